"""The run's directory: everyone tells a signed record about itself, and hears of everyone's.

Records live in the DHT, where newcomers find them; between two looks at it, they travel by `News`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hivemind.utils.timed_storage import get_dht_time

from collab_core.identity import Identity
from collab_core.swarm.names import Labels
from collab_core.swarm.news import News, Note
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import MAX_LIFETIME_S, PeerRecord, records_key, seal, unseal
from collab_core.telemetry.events import EventLog

logger = logging.getLogger(__name__)

RECORD_LIFETIME_S = 12.0  # a killed peer is gone from everyone's view after this long
HEARTBEAT_S = 3.0  # a record is made anew
STORE_PERIOD_S = 6.0  # it is stored in the DHT, for newcomers and for those whom news do not reach
READ_PERIOD_S = 12.0  # everyone's are read there; that takes more bytes than all news
FADING_S = RECORD_LIFETIME_S - STORE_PERIOD_S  # so near a record's end, the DHT has a newer one of whoever is alive
FADING_PERIOD_S = 1.0  # how often it is read then
STORE_TIMEOUT_S = 8.0  # a peer that just died holds up a request for 3 s; this must be longer, or nothing is stored
READ_TIMEOUT_S = 5.0
NEWS_PERIOD_S = 0.2
NEWS_PERIOD_PER_PEER_S = 0.01  # in a large swarm everybody's records change all the time
NEAR_S = 1.0  # a round that comes so soon is near; before that, news can wait for a part of the time that is left
CALM_SHARE, MAX_CALM_S = 0.25, 2.0
SILENCE_S = 1.0  # if a neighbour owes us news for so long, there is still the DHT
DHT_PERIOD_S = 0.3  # how often it is asked then
UNFIT_S = 10.0  # how long a neighbour that does not answer is left alone
MAX_PEERS = 1024
STILL_S = 300.0  # a trainer whose record tells no progress for so long is hung, and no company


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else in the run, as last heard of."""

    peer_id: str
    record: PeerRecord
    expires: float = field(compare=False)
    changed: float = field(compare=False, default_factory=time.monotonic)
    """When its record last told of progress."""


class Directory:
    """Our record and everybody else's. `start` runs in the reactor's thread; the rest is safe from any."""

    def __init__(self, identity: Identity, record: PeerRecord, reactor: Reactor, events: EventLog) -> None:
        self.peer_id = identity.peer_id
        self.reactor, self.events = reactor, events
        self.run_hash = b""
        self.node: Any = None
        self._p2p: Any = None
        self.on_new_peer: Callable[[], None] = lambda: None
        self.rank: Callable[[Peer], int] = lambda peer: peer.record.role != "aux"
        """Whom to ask for news: the lowest."""
        self.seconds_left: Callable[[], float] = lambda: 0.0
        """About how long nothing will happen for which others' progress has to be known; 0 if it may be now."""
        self.ignored: frozenset[str] = frozenset()
        """Peers that are no company: they are kept out of rounds."""
        self.last_sign_of_trainers = time.monotonic()
        """When another trainer was last seen to make progress; when we began to look, if never."""
        self._identity, self._record = identity, record
        self._peers: dict[str, Peer] = {}
        self._labels = Labels()
        self._labels.of(self.peer_id, record.name)  # nobody else gets our name
        self._lock = threading.Lock()
        self._changed: asyncio.Event | None = None
        self._news = News(self._take, self._renew)
        self._sealed: tuple[PeerRecord, Note] | None = None
        self._last_news = -SILENCE_S
        self._last_lapse = -RECORD_LIFETIME_S
        """When a record ran out for want of a newer one."""
        self._calm_s = 0.0
        self._contacts: Sequence[str] = ()
        self._unfit: dict[str, float] = {}
        """Neighbours that did not answer, and until when they are left alone."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, node: Any, p2p: Any, run_hash: bytes, contacts: Sequence[str]) -> None:
        """Begin to tell and to hear; at first from those who let us in."""
        self.node, self._p2p, self.run_hash, self._contacts = node, p2p, run_hash, contacts
        self._changed = asyncio.Event()
        await self._news.listen(p2p)
        self._tasks = [asyncio.create_task(loop()) for loop in (self._store_loop, self._read_loop, self._news_loop)]

    async def say_goodbye(self) -> None:
        """Others need not wait until our record runs out."""
        if self._record.role == "observer":
            return
        self._record = self._record.model_copy(update={"phase": "left"})
        await asyncio.gather(self._store(), self._hear_news(), return_exceptions=True)

    # --- telling about ourselves ---

    @property
    def record(self) -> PeerRecord:
        return self._record

    def publish(self, **changes: Any) -> None:
        """Change our record; others see it within a fraction of a second."""
        with self._lock:
            self._record = PeerRecord.model_validate({**self._record.model_dump(), **changes})

        def wake() -> None:
            if self._changed is not None:
                self._changed.set()

        self.reactor.call_soon(wake)

    def _note(self) -> Note:
        """Our record, sealed: made anew when it changed, and before it runs out."""
        now = get_dht_time()
        if self._sealed is not None:
            record, note = self._sealed
            if record == self._record and note.expires > now + RECORD_LIFETIME_S - HEARTBEAT_S:
                return note
        record, expires = self._record, now + RECORD_LIFETIME_S
        value = seal(record.model_copy(update={"time": time.time()}), self.run_hash, self._identity, expires)
        note = Note(self.peer_id, expires, value)
        self._sealed = record, note
        self._news.keep(note)
        return note

    def _renew(self) -> None:
        if self._record.role != "observer":
            self._note()

    async def _store(self) -> bool:
        """Whether anybody took it. A new one always: it has to last until the next is there."""
        self._sealed = None
        note = self._note()
        is_stored = await self.node.store(
            records_key(self.run_hash),
            value=note.value,
            subkey=note.peer_id,
            expiration_time=note.expires,
            await_all_replicas=False,
        )
        return bool(is_stored)

    async def _store_loop(self) -> None:
        if self._record.role == "observer":
            return
        stored: PeerRecord | None = None
        latest, is_stored = 0.0, False
        while True:
            now = time.monotonic()
            period = STORE_PERIOD_S if is_stored and not self._is_silent() else HEARTBEAT_S
            if now >= latest + period or (self._is_silent() and stored != self._record):
                stored, latest, is_stored = self._record, now, False
                try:
                    is_stored = await asyncio.wait_for(self._store(), timeout=STORE_TIMEOUT_S)
                except Exception as error:  # noqa: BLE001 - whatever the network does, the next heartbeat tries again
                    logger.debug("publishing our record failed: %r", error)
            await asyncio.sleep(DHT_PERIOD_S)

    # --- hearing about others ---

    @property
    def identity(self) -> Identity:
        """What we sign with."""
        return self._identity

    def peers(self) -> list[Peer]:
        """Everybody else who is alive, by peer ID."""
        now = get_dht_time()
        with self._lock:
            return [peer for _, peer in sorted(self._peers.items()) if peer.expires > now]

    def name_of(self, peer_id: str) -> str:
        """What a peer is called, also after it left; two of one name are told apart."""
        if peer_id == self.peer_id:
            return self._record.name
        with self._lock:
            known = self._peers.get(peer_id)
            return self._labels.of(peer_id, None if known is None else known.record.name)

    def refresh(self, timeout_s: float = READ_TIMEOUT_S, *, is_new: bool = False) -> bool:
        """Read everyone's records now, instead of waiting for the next round of reading; late is better than never.

        Args:
            is_new: we are new here; a neighbour then tells everything.

        Returns:
            Whether a neighbour told us what is new. What only the DHT says may be old.
        """

        async def read() -> bool:
            if is_new:
                self._news.begin_anew()
            _, is_heard = await asyncio.gather(self._read(), self._hear_news(), return_exceptions=True)
            return is_heard is True

        future = self.reactor.spawn(read())
        done, _ = concurrent.futures.wait([future], timeout=timeout_s)
        future.cancel()
        return bool(done) and not future.cancelled() and future.result()

    async def _read(self) -> None:
        found = await self.node.get(records_key(self.run_hash), latest=True)
        items = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        self._take(Note(peer_id, item.expiration_time, item.value) for peer_id, item in items)

    def _take(self, notes: Iterable[Note]) -> None:
        """Believe the notes that are signed and newer than what we have."""
        now = get_dht_time()
        arrived: dict[str, Peer] = {}
        for note in notes:
            if note.peer_id == self.peer_id or not max(now, self._news.newest(note.peer_id)) < note.expires:
                continue  # checking a signature takes longer than anything else here
            if note.expires > now + MAX_LIFETIME_S or self._is_too_much(note.peer_id, arrived):
                continue
            record = unseal(note.value, self.run_hash, note.peer_id, note.expires)
            if record is not None:
                self._news.keep(note)
                arrived[note.peer_id] = Peer(note.peer_id, record, note.expires)
        self._news.forget(now)
        self._merge(arrived, now)

    def _is_too_much(self, peer_id: str, arrived: Mapping[str, Peer]) -> bool:
        """Keys cost nothing. Whoever invents peers finds those who were here before them still being heard."""
        if peer_id in self._peers or peer_id in self._contacts:
            return False
        return len(self._peers.keys() | arrived.keys()) >= MAX_PEERS

    def _merge(self, arrived: dict[str, Peer], now: float) -> None:
        events: list[tuple[str, Peer, str]] = []
        with self._lock:
            for peer_id, peer in arrived.items():
                known = self._peers.get(peer_id)
                if known is not None and known.expires >= peer.expires:
                    continue
                if peer.record.phase == "left":
                    if known is not None:
                        del self._peers[peer_id]
                        events.append(("peer_left", known, "said goodbye"))
                    continue
                if known is not None and _progress(known) == _progress(peer):
                    peer = replace(peer, changed=known.changed)
                if known is None and peer.record.role != "observer":
                    events.append(("peer_joined", peer, ""))
                self._peers[peer_id] = peer
            for peer_id, peer in list(self._peers.items()):
                if peer.expires <= now:
                    self._last_lapse = time.monotonic()
                    del self._peers[peer_id]
                    events.append(("peer_left", peer, f"silent for {RECORD_LIFETIME_S:.0f} s"))
            moment = time.monotonic()
            trainers = (
                peer
                for peer_id, peer in self._peers.items()
                if peer.record.role == "trainer" and peer_id not in self.ignored
            )
            if any(moment - peer.changed < STILL_S for peer in trainers):
                self.last_sign_of_trainers = moment
        for event, peer, reason in events:
            extra = {"reason": reason} if reason else {}
            self.events.write(event, peer_id=peer.peer_id, name=peer.record.name, role=peer.record.role, **extra)
        if any(event == "peer_joined" for event, _, _ in events):
            self.on_new_peer()

    async def _read_loop(self) -> None:
        latest = 0.0
        while True:
            now = time.monotonic()
            period = FADING_PERIOD_S if self._is_fading() else READ_PERIOD_S
            if now >= latest + period or self._is_silent():
                latest = now
                try:
                    await asyncio.wait_for(self._read(), timeout=READ_TIMEOUT_S)
                except Exception as error:  # noqa: BLE001 - see _store_loop
                    logger.debug("reading records failed: %r", error)
            await asyncio.sleep(DHT_PERIOD_S)

    def _is_fading(self) -> bool:
        """Whether somebody may soon be gone from our view, or just went, of whom the DHT may know more."""
        soon = get_dht_time() + FADING_S
        has_lapsed = time.monotonic() < self._last_lapse + RECORD_LIFETIME_S
        return has_lapsed or any(peer.expires < soon for peer in self.peers())

    # --- news ---

    def _is_silent(self) -> bool:
        return time.monotonic() > self._last_news + self._calm_s + self._news_period() + SILENCE_S

    def _news_period(self) -> float:
        return NEWS_PERIOD_S + NEWS_PERIOD_PER_PEER_S * len(self._peers)

    def _neighbour(self) -> str | None:
        """The peer that everyone asks for news; it asks the next best one."""
        now = time.monotonic()
        ranked = sorted(self.peers(), key=lambda peer: (self.rank(peer), peer.peer_id))
        known = [peer.peer_id for peer in ranked if peer.record.is_reachable]
        return next((one for one in (*known, *self._contacts) if self._unfit.get(one, 0.0) <= now), None)

    async def _hear_news(self) -> bool:
        """Whether a neighbour told us what is new."""
        neighbour = self._neighbour()
        if neighbour is None:
            return False
        try:
            await self._news.ask(self._p2p, neighbour, self._note() if self._record.role != "observer" else None)
            self._last_news = time.monotonic()
        except Exception as error:  # noqa: BLE001 - a stranger's answer: whatever is wrong with it, we ask another one
            logger.info("%s has no news for us: %r", neighbour, error)
            self._unfit[neighbour] = time.monotonic() + UNFIT_S
            return False
        return True

    async def _news_loop(self) -> None:
        assert self._changed is not None
        while True:
            self._changed.clear()
            told = _turn(self._record)
            await self._hear_news()
            await asyncio.sleep(self._news_period())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=NEWS_PERIOD_S)
            self._calm_s = min(CALM_SHARE * max(0.0, self.seconds_left() - NEAR_S), MAX_CALM_S)
            until = time.monotonic() + self._calm_s
            while (left := until - time.monotonic()) > 0 and _turn(self._record) == told:
                self._changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), timeout=left)


def _progress(peer: Peer) -> tuple[object, ...]:
    return peer.record.epoch, peer.record.epoch_samples, peer.record.phase


def _turn(record: PeerRecord) -> PeerRecord:
    """What others should hear of at once: all but how far the work has come."""
    return record.model_copy(update={"epoch_samples": 0, "samples_per_second": 0.0, "loss": None})
