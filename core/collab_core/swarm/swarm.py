"""One class owns the DHT: joins it, keeps us in it, tells others about us and us about others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from collab_core import __version__
from collab_core.errors import Code, ConfigError, RunError, SwarmError
from collab_core.state.folder import MAX_REMEMBERED_PEERS, StateFolder
from collab_core.swarm.addresses import best_first, is_address_of, parse_address, peer_of, probe
from collab_core.swarm.daemon import Daemon, free_port
from collab_core.swarm.identity import Identity
from collab_core.swarm.names import friendly_name
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import MAX_NAME_CHARS, PeerRecord, RecordValidator, records_key, seal, unseal
from collab_core.telemetry.events import EventLog

logger = logging.getLogger(__name__)

EVERYWHERE = "/ip4/0.0.0.0/tcp/0"
RECORD_LIFETIME_S = 12.0  # a killed peer is gone from everyone's view after this long
HEARTBEAT_S = 3.0
MIN_PUBLISH_GAP_S = 0.2
READ_PERIOD_S = 0.3
RECONNECT_PERIOD_S = 4.0
CALL_TIMEOUT_S = 3.0
JOIN_ATTEMPTS = 4  # with pauses of 1, 2 and 4 seconds between them
GOODBYE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmConfig:
    """How this peer takes part in the network; its own business, not the run's."""

    role: Literal["trainer", "aux", "observer"]
    """An observer only looks: nobody sees it."""
    initial_peers: tuple[str, ...] = ()
    """Addresses to join through; if there are any, one of them must answer."""
    rumoured_peers: tuple[str, ...] = ()
    """Addresses that may be old; nobody minds if none of them answers."""
    host_maddrs: tuple[str, ...] = ()
    """Where to listen. Empty: every interface, on the port of the last time or `port`."""
    announce_maddrs: tuple[str, ...] = ()
    """What to tell others instead of the addresses we see ourselves."""
    port: int | None = None
    """None: the port of the last time if it is free, otherwise any."""
    client_mode: bool = False
    """Only dial out: nobody can connect to us."""
    identity_path: Path | None = None
    """Key file; by default in the state folder."""
    name: str = ""
    """What others see; by default made from the peer ID."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else in the run, as last heard of."""

    peer_id: str
    record: PeerRecord
    expires: float = field(compare=False)
    changed: float = field(compare=False, default_factory=time.monotonic)
    """When its record last told of progress."""


class Swarm:
    """This peer's place in the run's network."""

    def __init__(self, config: SwarmConfig, folder: StateFolder, events: EventLog) -> None:
        self.config = config
        self.events = events
        self._folder = folder
        identity_path = config.identity_path or folder.identity
        self._identity = Identity.load_or_create(identity_path)
        self._identity_path = identity_path
        self.peer_id = self._identity.peer_id
        if len(config.name) > MAX_NAME_CHARS or not config.name.isprintable():
            raise ConfigError(
                Code.BAD_OPTION,
                f"--name {config.name[:60]!r} is not a name others can be shown.",
                fix=f"Choose one of at most {MAX_NAME_CHARS} printable characters.",
            )
        self._record = PeerRecord(
            name=config.name or friendly_name(self.peer_id),
            role=config.role,
            mode="client" if config.client_mode else "direct",
            version=__version__,
            phase="joining",
            time=time.time(),
        )
        self.reactor = Reactor()
        self.p2p: Any = None
        self._node: Any = None
        self._daemon: Daemon | None = None
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._changed: asyncio.Event | None = None
        self.run_hash = b""
        self._port = 0
        self.grant = ""
        """The organiser's signature under our peer ID, if we are one of their auxiliaries."""
        self._bootstrap: list[str] = []
        self._remembered: list[str] = []
        self._last_sign = time.monotonic()
        self._loops: list[asyncio.Task[None]] = []
        self._is_closed = False

    # --- joining and leaving ---

    def connect(self) -> None:
        """Start the daemon and reach the first peers. Enough to ask them for the manifest, not yet part of the run."""
        use_hivemind_log_handler("nowhere")
        candidates = self._candidates()
        if self.config.client_mode and not candidates:
            raise ConfigError(
                Code.BAD_OPTION,
                "A peer that only dials out (--client-mode, `collab status`) needs somebody to dial.",
                fix="Give an invite instead of a run folder, or an address with --initial-peers.",
            )
        self._bootstrap = self._reachable(candidates) if candidates else []
        self._daemon = self._start_daemon(self._bootstrap)
        self.reactor.run(self._start_transport(), timeout_s=30)
        self._remember_place()

    def join(self, run_hash: bytes) -> None:
        """Enter the run's directory: from now on others hear of us, and we of them."""
        self.run_hash = run_hash
        self._record = self._record.model_copy(update={"grant": self.grant})
        self.reactor.run(self._start_node(), timeout_s=60)

    @property
    def bootstrap_peers(self) -> list[str]:
        """IDs of the peers we reached when we connected."""
        return list(dict.fromkeys(peer_of(address) for address in self._bootstrap))

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def addresses(self) -> list[str]:
        """Where others can reach us, the most public first; nothing in client mode."""
        return list(self._record.addresses)

    def _candidates(self) -> list[str]:
        """Everyone we could join through: those we were told of, then those we met before."""
        for address in self.config.initial_peers:
            parse_address(address, needs_peer=True)
        memories = [*self._folder.read_peers(), *self.config.rumoured_peers]
        good = [address for address in memories if is_address_of(address, peer_of(address))]
        known = dict.fromkeys([*self.config.initial_peers, *good])
        return [address for address in known if peer_of(address) != self.peer_id]

    def _reachable(self, candidates: list[str]) -> list[str]:
        """Those who answer now; with pauses, because the aux may be restarting this very moment."""
        reasons: dict[str, str] = {}
        for attempt in range(JOIN_ATTEMPTS):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            reasons = self.reactor.run(probe(candidates))
            if reachable := [address for address, reason in reasons.items() if not reason]:
                return reachable
            if not self.config.initial_peers:
                return []  # only memories, and all of them gone: we start the swarm again
        listed = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        raise SwarmError(
            Code.UNREACHABLE,
            f"None of the first peers answers ({listed}).",
            fix="Check your internet connection, ask the organiser whether the auxiliary peer is up, then try again.",
        )

    def _start_daemon(self, bootstrap: list[str]) -> Daemon:
        config = self.config
        for address in (*config.host_maddrs, *config.announce_maddrs):
            parse_address(address)
        wanted = config.port if config.port is not None else (self._folder.read_port() or 0)

        hosts = config.host_maddrs or (EVERYWHERE,)

        def start(port: int) -> Daemon:
            listen = []
            if not config.client_mode:
                # We choose the port, so that we know it whatever addresses are announced.
                self._port = port or free_port(hosts[0])
                listen = [_with_port(address, self._port) for address in hosts]
            return Daemon(
                identity=self._identity_path,
                listen=listen,
                announce=config.announce_maddrs,
                bootstrap=bootstrap,
                client_mode=config.client_mode,
            )

        try:
            return start(wanted)
        except SwarmError as error:
            if error.code is not Code.PORT_TAKEN or config.port is not None or not wanted:
                raise
        logger.warning("Port %d of the last time is taken; taking another one. The old invite will not work.", wanted)
        return start(0)

    async def _start_transport(self) -> None:
        assert self._daemon is not None
        # Each peer keeps its sockets in its daemon's folder, which is removed with it.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{self._daemon.folder}/"
        self.p2p = await P2P.replicate(Multiaddr(self._daemon.control_address))
        if not self.config.client_mode:
            addresses = best_first(str(address) for address in await self.p2p.get_visible_maddrs())[:8]
            self._record = self._record.model_copy(update={"addresses": addresses})

    async def _start_node(self) -> None:
        # A node ID that follows from the peer ID: a restarted peer is the same node in everyone's routing table.
        node_id = DHTID.generate(source=self.peer_id)
        try:
            self._node = await DHTNode.create(
                p2p=self.p2p,
                node_id=node_id,
                initial_peers=self._bootstrap or None,
                client_mode=self.config.client_mode,
                record_validator=RecordValidator(self.run_hash, get_dht_time),
                ensure_bootstrap_success=False,
                strict=False,
                blacklist_time=1.0,
                backoff_rate=1.0,
            )
        except Exception as error:
            raise SwarmError(
                Code.UNREACHABLE,
                f"The first peers answer, but the run's directory cannot be joined through them ({error}).",
                fix="Try again in a minute; if it stays, ask the organiser for a fresh invite.",
            ) from error
        self._changed = asyncio.Event()
        loops = (self._publish_loop, self._read_loop, self._reconnect_loop)
        self._loops = [asyncio.create_task(loop()) for loop in loops]

    def _remember_place(self) -> None:
        """For our next start, and for peers of the same run on this machine."""
        if not self.config.client_mode and self.config.role != "observer":
            self._folder.write_port(self._port)
            self._folder.write_addresses(self.addresses)

    def close(self) -> None:
        """Say goodbye and leave nothing behind. Bounded, and safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._node is not None:
            with contextlib.suppress(Exception):  # a goodbye is a courtesy; nobody waits for it
                self.reactor.run(self._say_goodbye(), timeout_s=GOODBYE_TIMEOUT_S)
        self.reactor.close()
        if self._daemon is not None:
            self._daemon.stop()

    async def _say_goodbye(self) -> None:
        self._record = self._record.model_copy(update={"phase": "left"})
        await self._store()

    def check_alive(self) -> None:
        """Raise if the daemon died under us: without it nothing works any more."""
        if self._daemon is not None and not self._daemon.is_alive() and not self._is_closed:
            raise RunError(
                Code.DAEMON_FAILED,
                "The libp2p daemon of this peer ended unexpectedly.",
                fix="Start the peer again; it resumes from its state folder. If it repeats, check memory (dmesg).",
            )

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
            await self._node.store(
                records_key(self.run_hash),
                value=value,
                subkey=self.peer_id,
                expiration_time=expiration,
                await_all_replicas=False,
            )
        )

    async def _publish_loop(self) -> None:
        assert self._changed is not None
        if self.config.role == "observer":
            return
        while True:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._store(), timeout=HEARTBEAT_S)
            except Exception as error:  # noqa: BLE001 - whatever the network does, the next heartbeat tries again
                logger.debug("publishing our record failed: %r", error)
            await asyncio.sleep(MIN_PUBLISH_GAP_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout=HEARTBEAT_S)

    # --- hearing about others ---

    def peers(self) -> list[Peer]:
        """Everybody else who is alive, by peer ID."""
        now = get_dht_time()
        with self._lock:
            return [peer for _, peer in sorted(self._peers.items()) if peer.expires > now]

    def peer(self, peer_id: str) -> Peer | None:
        with self._lock:
            found = self._peers.get(peer_id)
        return found if found is not None and found.expires > get_dht_time() else None

    def name_of(self, peer_id: str) -> str:
        """The name others know a peer by, also after it left."""
        with self._lock:
            found = self._peers.get(peer_id)
        return found.record.name if found else self.name if peer_id == self.peer_id else friendly_name(peer_id)

    def refresh(self, timeout_s: float = 5.0) -> None:
        """Read everyone's records now, instead of waiting for the next round of reading; late is better than never."""
        future = self.reactor.spawn(self._read())
        concurrent.futures.wait([future], timeout=timeout_s)
        future.cancel()

    def last_sign_of_trainers(self, still_s: float) -> float:
        """When (by the monotonic clock) a trainer was last seen doing something; when we joined, if never.

        A trainer whose record has not changed for `still_s` seconds is hung, and no company.
        """
        now = time.monotonic()
        with self._lock:
            for peer in self._peers.values():
                if peer.record.role == "trainer" and now - peer.changed < still_s and peer.expires > get_dht_time():
                    self._last_sign = now
            return self._last_sign

    async def _read(self) -> None:
        found = await self._node.get(records_key(self.run_hash), latest=True)
        now = get_dht_time()
        arrived: dict[str, Peer] = {}
        if found is not None and isinstance(found.value, dict):
            for peer_id, item in found.value.items():
                if peer_id == self.peer_id:
                    continue
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
                if peer.record.role == "trainer" and known is None:
                    self._last_sign = time.monotonic()
                if known is None and peer.record.role != "observer":
                    events.append(("peer_joined", peer, ""))
                self._peers[peer_id] = peer
            for peer_id, peer in list(self._peers.items()):
                if peer.expires <= now:
                    del self._peers[peer_id]
                    events.append(("peer_left", peer, f"silent for {RECORD_LIFETIME_S:.0f} s"))
        for event, peer, reason in events:
            extra = {"reason": reason} if reason else {}
            self.events.write(event, peer_id=peer.peer_id, name=peer.record.name, role=peer.record.role, **extra)
        if any(event == "peer_joined" for event, _, _ in events):
            self._remember()

    def _remember(self) -> None:
        """Keep the addresses of reachable peers for the next start."""
        told = ((peer.peer_id, peer.record.addresses[0]) for peer in self.peers() if peer.record.addresses)
        addresses = [address for peer_id, address in told if is_address_of(address, peer_id)]
        self._remembered = list(dict.fromkeys([*addresses, *self._remembered]))[:MAX_REMEMBERED_PEERS]
        try:
            self._folder.write_peers(self._remembered)
        except OSError as error:
            logger.warning("Cannot remember peers: %s", error)

    async def _read_loop(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._read(), timeout=5.0)
            except Exception as error:  # noqa: BLE001 - see _publish_loop
                logger.debug("reading records failed: %r", error)
            await asyncio.sleep(READ_PERIOD_S)

    async def _reconnect_loop(self) -> None:
        """Dial the first peers again whenever we lost them: the aux that restarted finds us still here."""
        while True:
            await asyncio.sleep(RECONNECT_PERIOD_S)
            try:
                known = await asyncio.wait_for(self.p2p.list_peers(), timeout=CALL_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - see _publish_loop
                logger.info("the daemon does not say whom we are connected to: %r", error)
                continue
            connected = {info.peer_id.to_base58() for info in known}
            # Connected is not enough: a peer that was away is gone from our DHT routing table until it is pinged.
            routed = {peer_id.to_base58() for peer_id in self._node.protocol.routing_table.uid_to_peer_id.values()}
            for address in dict.fromkeys((*self.config.initial_peers, *self._remembered[:8])):
                peer_id = peer_of(address)
                if peer_id != self.peer_id and peer_id not in connected & routed:
                    await self._dial(address, peer_id in connected)

    async def _dial(self, address: str, is_connected: bool) -> None:
        try:
            remote = PeerID.from_base58(peer_of(address))
            target = Multiaddr(address.rpartition("/p2p/")[0])
            if not is_connected:
                await asyncio.wait_for(self.p2p._client.connect(remote, [target]), timeout=CALL_TIMEOUT_S)
            await asyncio.wait_for(self._node.protocol.call_ping(remote), timeout=CALL_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - still away: the next round tries again
            logger.info("%s cannot be reached again yet: %r", address, error)


def _progress(peer: Peer) -> tuple[object, ...]:
    return peer.record.epoch, peer.record.epoch_samples, peer.record.phase


def _with_port(address: str, port: int) -> str:
    """`/ip4/0.0.0.0/tcp/0` listens on the wanted port; an address that names a port keeps it."""
    head, _, last = address.rpartition("/")
    return f"{head}/{port}" if last == "0" else address
