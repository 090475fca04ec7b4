"""Chunks from everyone who has them, at once: the slow give little, the dead and the liars nothing."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from collab_core.tree import CHUNK_BYTES

AHEAD_S = 0.5  # how much of a donor's time is asked for in advance: enough to keep its link busy, little to lose
MIN_WINDOW, MAX_WINDOW = 2, 16
SMOOTHING = 0.3
MESSAGE_TIMEOUT_S = 15.0
MIN_BYTES_PER_SECOND = 64 * 1024  # a donor slower than this is set aside

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""(donor, digest) → the chunk; empty if the donor does not have it."""


class DonorFailed(Exception):
    """A donor could not, or would not, give what it promised."""


@dataclass(slots=True)
class Donor:
    """What we know of somebody who has chunks."""

    peer_id: str
    has: Collection[bytes] | None = None
    """Which chunks; None: all of them."""
    rate: float = 0.0
    """Bytes per second, as measured."""
    asked: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)
    last_answer: float = 0.0
    num_bytes: int = 0

    @property
    def window(self) -> int:
        """Requests in flight."""
        return min(max(MIN_WINDOW, math.ceil(self.rate * AHEAD_S / CHUNK_BYTES) + 1), MAX_WINDOW)

    def may_have(self, digest: bytes) -> bool:
        return self.has is None or digest in self.has


@dataclass(slots=True)
class Progress:
    """How far a download is."""

    total_bytes: int
    num_bytes: int = 0
    bytes_per_second: float = 0.0
    donors: int = 0


class Download:
    """One set of chunks.

    Args:
        sizes: what is wanted: chunk → its size.
        ask: gets one chunk from a donor.
        keep: takes a chunk that is proven to be right.
        on_bad_donor: told who failed us, and how; it is asked for nothing more.
        on_progress: told after every chunk.
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
        self.progress = Progress(sum(sizes.values()))
        self._donors: list[Donor] = []
        self._todo: list[bytes] = []
        self._news = asyncio.Event()
        self._started = time.monotonic()

    async def run(self, donors: Collection[Donor]) -> list[str]:
        """Until nothing is missing or nobody is left to ask; who gave something, most first."""
        self._donors = list(donors)
        self._todo = self._rarest_last()
        try:
            while self.missing and self._donors:
                self._news.clear()
                for donor in list(self._donors):
                    self._ask_for_more(donor)
                if not any(donor.asked for donor in self._donors):
                    break  # what is missing, nobody has
                await self._news.wait()
        finally:
            tasks = [task for donor in self._donors for task in donor.asked.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [d.peer_id for d in sorted(donors, key=lambda donor: -donor.num_bytes) if d.num_bytes]

    def _rarest_last(self) -> list[bytes]:
        """Taken from the end: what few have first, and what all have in an order of our own, so that newcomers who
        come together soon have something to give each other."""
        order = list(self.missing)
        random.shuffle(order)
        order.sort(key=lambda digest: -sum(donor.may_have(digest) for donor in self._donors))
        return order

    def _ask_for_more(self, donor: Donor) -> None:
        while len(donor.asked) < donor.window:
            digest = self._next_for(donor)
            if digest is None:
                return
            donor.asked[digest] = asyncio.create_task(self._get(donor, digest))

    def _next_for(self, donor: Donor) -> bytes | None:
        for position in range(len(self._todo) - 1, -1, -1):
            digest = self._todo[position]
            if digest not in self.missing:
                del self._todo[position]
            elif donor.may_have(digest):
                del self._todo[position]
                return digest
        # Everything is asked for. Whoever has nothing to do is asked for what somebody slower is still busy with.
        times_asked: dict[bytes, int] = {}
        for other in self._donors:
            for digest in other.asked:
                times_asked[digest] = times_asked.get(digest, 0) + 1
        open_elsewhere = (
            digest
            for other in sorted(self._donors, key=lambda other: other.rate)
            for digest in other.asked
            if digest in self.missing and digest not in donor.asked and donor.may_have(digest)
        )
        return next((digest for digest in open_elsewhere if times_asked[digest] < 2), None)

    async def _get(self, donor: Donor, digest: bytes) -> None:
        size = self._sizes[digest]
        started = time.monotonic()
        timeout_s = MESSAGE_TIMEOUT_S + donor.window * CHUNK_BYTES / MIN_BYTES_PER_SECOND
        try:
            chunk = await asyncio.wait_for(self._ask(donor.peer_id, digest), timeout_s)
            if not chunk:
                raise DonorFailed("no longer holds that state")
            if len(chunk) != size:
                raise DonorFailed("sent bytes of the wrong size")
            if blake3(chunk).digest() != digest:
                raise DonorFailed("sent bytes that do not match their hash")
        except DonorFailed as error:
            self._set_aside(donor, digest, str(error))
        except asyncio.TimeoutError:
            self._set_aside(donor, digest, "is too slow")
        except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
            self._set_aside(donor, digest, f"the connection broke ({type(error).__name__})")
        else:
            self._took(donor, digest, chunk, started)
        self._news.set()

    def _took(self, donor: Donor, digest: bytes, chunk: bytes, started: float) -> None:
        del donor.asked[digest]
        now = time.monotonic()
        rate = len(chunk) / max(now - max(started, donor.last_answer), 1e-6)
        donor.rate = rate if donor.rate == 0 else (1 - SMOOTHING) * donor.rate + SMOOTHING * rate
        donor.last_answer = now
        if digest not in self.missing:
            self.wasted_bytes += len(chunk)
            return
        self.missing.discard(digest)
        donor.num_bytes += len(chunk)
        self._keep(digest, chunk)
        progress = self.progress
        progress.num_bytes += len(chunk)
        progress.bytes_per_second = progress.num_bytes / max(now - self._started, 1e-6)
        progress.donors = sum(bool(one.asked) or one is donor for one in self._donors)
        self._on_progress(progress)

    def _set_aside(self, donor: Donor, failed: bytes, reason: str) -> None:
        """Whoever fails once is asked for nothing more; what it was asked for, others are."""
        if donor not in self._donors:
            return
        self._donors.remove(donor)
        for digest, task in donor.asked.items():
            if digest != failed:
                task.cancel()
            if digest in self.missing and not any(digest in other.asked for other in self._donors):
                self._todo.append(digest)
        donor.asked.clear()
        self._on_bad_donor(donor.peer_id, reason)
