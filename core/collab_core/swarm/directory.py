"""The run's directory in the DHT: everyone writes a signed record about itself and reads everyone's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hivemind.utils.timed_storage import get_dht_time

from collab_core.identity import Identity
from collab_core.swarm.names import friendly_name
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import PeerRecord, records_key, seal, unseal
from collab_core.telemetry.events import EventLog

logger = logging.getLogger(__name__)

RECORD_LIFETIME_S = 12.0  # a killed peer is gone from everyone's view after this long
HEARTBEAT_S = 3.0
STORE_TIMEOUT_S = 8.0  # a peer that just died holds up a request for 3 s; this must be longer, or nothing is stored
MIN_PUBLISH_GAP_S = 0.2
READ_PERIOD_S = 0.3
READ_TIMEOUT_S = 5.0
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
        self.on_new_peer: Callable[[], None] = lambda: None
        self.last_sign_of_trainers = time.monotonic()
        """When another trainer was last seen to make progress; when we began to look, if never."""
        self._identity, self._record = identity, record
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._changed: asyncio.Event | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, node: Any, run_hash: bytes) -> None:
        """Begin to tell and to hear."""
        self.node, self.run_hash = node, run_hash
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(loop()) for loop in (self._publish_loop, self._read_loop)]

    async def say_goodbye(self) -> None:
        """Others need not wait until our record runs out."""
        if self._record.role == "observer":
            return
        self._record = self._record.model_copy(update={"phase": "left"})
        await self._store()

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

    async def _store(self) -> bool:
        expiration = get_dht_time() + RECORD_LIFETIME_S
        record = self._record.model_copy(update={"time": time.time()})
        value = seal(record, self.run_hash, self._identity, expiration)
        return bool(
            await self.node.store(
                records_key(self.run_hash),
                value=value,
                subkey=self.peer_id,
                expiration_time=expiration,
                await_all_replicas=False,
            )
        )

    async def _publish_loop(self) -> None:
        assert self._changed is not None
        if self._record.role == "observer":
            return
        while True:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._store(), timeout=STORE_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - whatever the network does, the next heartbeat tries again
                logger.debug("publishing our record failed: %r", error)
            await asyncio.sleep(MIN_PUBLISH_GAP_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=HEARTBEAT_S)

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
        """The name others know a peer by, also after it left; if several go by it, with the end of its ID."""
        with self._lock:
            names = {known: peer.record.name for known, peer in self._peers.items()} | {self.peer_id: self._record.name}
        name = names.pop(peer_id, None) or friendly_name(peer_id)
        return f"{name}-{peer_id[-4:]}" if name in names.values() else name

    def refresh(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Read everyone's records now, instead of waiting for the next round of reading; late is better than never."""
        future = self.reactor.spawn(self._read())
        concurrent.futures.wait([future], timeout=timeout_s)
        future.cancel()

    async def _read(self) -> None:
        found = await self.node.get(records_key(self.run_hash), latest=True)
        now = get_dht_time()
        arrived: dict[str, Peer] = {}
        if found is not None and isinstance(found.value, dict):
            for peer_id, item in found.value.items():
                known = self._peers.get(peer_id)
                if peer_id == self.peer_id or (known is not None and known.expires >= item.expiration_time):
                    continue  # checking a signature takes longer than anything else here
                record = unseal(item.value, self.run_hash, peer_id, item.expiration_time)
                if record is not None and item.expiration_time > now:
                    arrived[peer_id] = Peer(peer_id, record, item.expiration_time)
        self._merge(arrived, now)

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
                    del self._peers[peer_id]
                    events.append(("peer_left", peer, f"silent for {RECORD_LIFETIME_S:.0f} s"))
            moment = time.monotonic()
            trainers = (peer for peer in self._peers.values() if peer.record.role == "trainer")
            if any(moment - peer.changed < STILL_S for peer in trainers):
                self.last_sign_of_trainers = moment
        for event, peer, reason in events:
            extra = {"reason": reason} if reason else {}
            self.events.write(event, peer_id=peer.peer_id, name=peer.record.name, role=peer.record.role, **extra)
        if any(event == "peer_joined" for event, _, _ in events):
            self.on_new_peer()

    async def _read_loop(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._read(), timeout=READ_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - see _publish_loop
                logger.debug("reading records failed: %r", error)
            await asyncio.sleep(READ_PERIOD_S)


def _progress(peer: Peer) -> tuple[object, ...]:
    return peer.record.epoch, peer.record.epoch_samples, peer.record.phase
