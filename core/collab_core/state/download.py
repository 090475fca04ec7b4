"""Chunks from everyone who has them, at once: the slow give little, the dead and the liars nothing."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from collab_core.tree import CHUNK_BYTES

AHEAD_S = 0.5  # how much of a donor's time is asked for in advance: enough to keep its link busy, little to lose
MIN_WINDOW, MAX_WINDOW = 2, 16
MAX_CHUNKS_PER_REQUEST = 256
MEMORY_S = 3.0  # over which a donor's speed is measured
MESSAGE_TIMEOUT_S = 15.0
MIN_BYTES_PER_SECOND = 64 * 1024  # a donor slower than this is set aside
MIN_REST_S, MAX_REST_S = 0.5, 8.0  # before a donor that was busy is asked again; twice as long each time
BUSY_PATIENCE_S = 120.0  # with a donor that is busy and gives nothing

Chunks = tuple[bytes, ...]
Ask = Callable[[str, Chunks], Awaitable[bytes]]
"""(donor, digests) → these chunks, one after the other; empty if the donor lacks one."""


class DonorFailed(Exception):
    """A donor could not, or would not, give what it promised."""


class Lacking(DonorFailed):
    """A donor does not have what it was asked for, or not any more."""


class DonorBusy(DonorFailed):
    """A donor gives away all that its owner allows. Nothing is wrong with it: later it has time for us."""


@dataclass(slots=True)
class Donor:
    """What we know of somebody who has chunks."""

    peer_id: str
    has: Collection[bytes] | None = None
    """Which chunks; None: all of them."""
    rate: float = 0.0
    """Bytes per second over the last seconds."""
    asked: dict[Chunks, asyncio.Task[None]] = field(default_factory=dict)
    max_window: int = MAX_WINDOW
    rests_until: float = 0.0
    """It was busy: nothing is asked of it before."""
    _rest_s: float = MIN_REST_S
    _busy_since: float = math.inf
    _since: float = 0.0
    _recent_bytes: float = 0.0
    _recent_s: float = 0.0

    @property
    def window(self) -> int:
        """Requests in flight."""
        return min(max(MIN_WINDOW, math.ceil(self.rate * AHEAD_S / CHUNK_BYTES) + 1), self.max_window)

    def rest(self, now: float) -> float:
        """It was busy. From now on we ask for one thing at a time, and at first for nothing; for how long."""
        self.max_window = 1
        self._busy_since = min(self._busy_since, now)
        rest_s, self._rest_s = self._rest_s, min(2 * self._rest_s, MAX_REST_S)
        self.rests_until = now + rest_s
        return rest_s

    def is_hopeless(self, now: float) -> bool:
        """Whether it has been busy for too long."""
        return now - self._busy_since > BUSY_PATIENCE_S

    def note(self, num_bytes: int, started: float, now: float) -> None:
        """An answer came. Answers come in bursts, so what counts is what came over some time."""
        self._rest_s, self._busy_since = MIN_REST_S, math.inf
        passed_s = now - max(self._since, started)
        self._since = now
        fade = math.exp(-passed_s / MEMORY_S)
        self._recent_bytes = fade * self._recent_bytes + num_bytes
        self._recent_s = fade * self._recent_s + passed_s
        self.rate = self._recent_bytes / max(self._recent_s, 1e-3)

    def may_have(self, digest: bytes) -> bool:
        return self.has is None or digest in self.has


@dataclass(slots=True)
class Progress:
    """How far a download is."""

    total_bytes: int
    num_bytes: int = 0
    bytes_per_second: float = 0.0
    num_donors: int = 0


class Download:
    """One set of chunks. Small ones travel together.

    Args:
        sizes: what is wanted: chunk → its size.
        ask: gets some chunks from a donor.
        keep: takes a chunk that is proven to be right.
        on_bad_donor: told who failed us, and how; it is asked for nothing more.
        on_progress: told whenever something arrived.
    """

    def __init__(
        self,
        sizes: Mapping[bytes, int],
        ask: Ask,
        keep: Callable[[bytes, bytes], None],
        on_bad_donor: Callable[[str, str], None],
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._sizes, self._ask, self._keep = sizes, ask, keep
        self._on_bad_donor, self._on_progress = on_bad_donor, on_progress
        self.missing = set(sizes)
        self.wasted_bytes = 0
        """What came twice."""
        self.lost_bytes: Counter[str] = Counter()
        """What each donor that failed had been asked for and had not given."""
        self.late_bytes = 0
        """What was asked of a second donor at the end."""
        self.progress = Progress(sum(sizes.values()))
        self._donors: dict[str, Donor] = {}
        self._set_aside: set[str] = set()
        self._given: Counter[str] = Counter()
        self._todo: list[bytes] = []
        """Missing and asked of nobody. Taken from the end."""
        self._news = asyncio.Event()
        self._started = time.monotonic()

    @property
    def helpers(self) -> tuple[str, ...]:
        """Who gave something, most first."""
        return tuple(peer_id for peer_id, _ in self._given.most_common())

    def offer(self, peer_id: str, has: Collection[bytes] | None = None) -> None:
        """Somebody has these chunks, or all of them; may be said again when it has more."""
        if peer_id in self._set_aside:
            return
        self._donors.setdefault(peer_id, Donor(peer_id)).has = has
        self._news.set()

    async def run(self) -> None:
        """Until nothing is missing, or what is missing nobody has."""
        self._todo = list(self.missing)
        try:
            while self.missing:
                self._news.clear()
                self._sort()
                for donor in list(self._donors.values()):
                    self._ask_for_more(donor)
                now = time.monotonic()
                if not any(donor.asked or donor.rests_until > now for donor in self._donors.values()):
                    return
                await self._news.wait()
        finally:
            tasks = [task for donor in self._donors.values() for task in donor.asked.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sort(self) -> None:
        """What few have comes first, and what all have in an order of our own, so that newcomers who come together
        soon have something to give each other."""
        partial = [donor for donor in self._donors.values() if donor.has is not None]
        if self.progress.num_bytes == 0:
            random.shuffle(self._todo)
        if partial:
            self._todo.sort(key=lambda digest: -sum(donor.may_have(digest) for donor in partial))

    def _ask_for_more(self, donor: Donor) -> None:
        if donor.rests_until > time.monotonic():
            return
        while len(donor.asked) < donor.window:
            if not (wanted := self._next_for(donor)):
                if not (wanted := self._late_for(donor)):
                    return
                self.late_bytes += self._size(wanted)
            donor.asked[wanted] = asyncio.create_task(self._get(donor, wanted))

    def _next_for(self, donor: Donor) -> Chunks:
        chosen: list[bytes] = []
        others: list[bytes] = []
        size = 0
        while self._todo and len(chosen) < MAX_CHUNKS_PER_REQUEST:
            digest = self._todo.pop()
            if digest not in self.missing:
                continue
            if not donor.may_have(digest):
                others.append(digest)
            elif chosen and size + self._sizes[digest] > CHUNK_BYTES:
                others.append(digest)
                break
            else:
                chosen.append(digest)
                size += self._sizes[digest]
        self._todo.extend(reversed(others))
        return tuple(chosen)

    def _late_for(self, donor: Donor) -> Chunks:
        """Everything is asked for. Whoever has nothing to do is asked for what somebody slower is still busy with."""
        if donor.asked:
            return ()
        times_asked = Counter(wanted for other in self._donors.values() for wanted in other.asked)
        for other in sorted(self._donors.values(), key=lambda other: other.rate):
            for wanted in other.asked:
                if times_asked[wanted] == 1 and all(donor.may_have(digest) for digest in wanted):
                    return wanted
        return ()

    async def _get(self, donor: Donor, wanted: Chunks) -> None:
        started = time.monotonic()
        timeout_s = MESSAGE_TIMEOUT_S + donor.window * CHUNK_BYTES / MIN_BYTES_PER_SECOND
        try:
            data = await asyncio.wait_for(self._ask(donor.peer_id, wanted), timeout_s)
            chunks = self._split(wanted, data)
        except DonorBusy:
            self._let_rest(donor, wanted)
        except DonorFailed as error:
            if isinstance(error, Lacking) and donor.has is not None:  # it got the rest just now; we hear of it soon
                donor.has = frozenset()
                self._release(donor, wanted)
            else:
                self._drop(donor, wanted, str(error))
        except TimeoutError:
            self._drop(donor, wanted, "is too slow")
        except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
            self._drop(donor, wanted, f"the connection broke ({type(error).__name__})")
        else:
            self._took(donor, wanted, chunks, started)
        finally:
            self._news.set()

    def _split(self, wanted: Chunks, data: bytes) -> dict[bytes, bytes]:
        if not data:
            raise Lacking("no longer holds that state")
        if len(data) != self._size(wanted):
            raise DonorFailed("sent bytes of the wrong size")
        chunks: dict[bytes, bytes] = {}
        start = 0
        for digest in wanted:
            chunk = data[start : start + self._sizes[digest]]
            if blake3(chunk).digest() != digest:
                raise DonorFailed("sent bytes that do not match their hash")
            chunks[digest] = chunk
            start += len(chunk)
        return chunks

    def _took(self, donor: Donor, wanted: Chunks, chunks: Mapping[bytes, bytes], started: float) -> None:
        donor.asked.pop(wanted, None)
        now = time.monotonic()
        size = sum(map(len, chunks.values()))
        donor.note(size, started, now)
        news = {digest: chunk for digest, chunk in chunks.items() if digest in self.missing}
        self.wasted_bytes += size - sum(map(len, news.values()))  # where somebody else was quicker
        if not news:
            return
        size = sum(map(len, news.values()))
        self.missing -= news.keys()
        self._given[donor.peer_id] += size
        for digest, chunk in news.items():
            self._keep(digest, chunk)
        for other in self._donors.values():
            if (late := other.asked.pop(wanted, None)) is not None:
                late.cancel()
        progress = self.progress
        progress.num_bytes += size
        progress.bytes_per_second = progress.num_bytes / max(now - self._started, 1e-6)
        progress.num_donors = sum(bool(one.asked) or one is donor for one in self._donors.values())
        self._on_progress(progress)

    def _size(self, wanted: Chunks) -> int:
        return sum(self._sizes[digest] for digest in wanted)

    def _let_rest(self, donor: Donor, wanted: Chunks) -> None:
        now = time.monotonic()
        rest_s = donor.rest(now)
        if donor.is_hopeless(now):
            self._drop(donor, wanted, f"was too busy for {BUSY_PATIENCE_S:.0f} s")
        else:
            self._release(donor, wanted)
            asyncio.get_running_loop().call_later(rest_s, self._news.set)

    def _drop(self, donor: Donor, failed: Chunks, reason: str) -> None:
        """Whoever fails once is asked for nothing more; what it was asked for, others are."""
        if self._donors.pop(donor.peer_id, None) is None:
            return
        self._set_aside.add(donor.peer_id)
        for wanted, task in list(donor.asked.items()):
            if wanted != failed:
                task.cancel()
            self.lost_bytes[donor.peer_id] += self._size(wanted)
            self._release(donor, wanted)
        self._on_bad_donor(donor.peer_id, reason)

    def _release(self, donor: Donor, wanted: Chunks) -> None:
        donor.asked.pop(wanted, None)
        if not any(wanted in other.asked for other in self._donors.values()):
            self._todo.extend(digest for digest in wanted if digest in self.missing)


def pack_request(digests: Sequence[bytes]) -> bytes:
    """The chunks somebody is asked for, as they travel."""
    return b"".join(digests)


def unpack_request(data: bytes) -> list[bytes]:
    """Which chunks are asked for; none if it is nonsense."""
    size = blake3().digest_size
    if len(data) % size or len(data) > size * MAX_CHUNKS_PER_REQUEST:
        return []
    return [data[start : start + size] for start in range(0, len(data), size)]
