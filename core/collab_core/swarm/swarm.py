"""One class owns our place in the network: the daemon, the DHT node, the directory of peers; and keeps us in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from collab_core import __version__
from collab_core.errors import Code, ConfigError, RunError, SwarmError
from collab_core.identity import Identity
from collab_core.state.folder import MAX_REMEMBERED_PEERS, StateFolder
from collab_core.swarm.addresses import (
    host_and_port,
    ipv4_if_any,
    is_address_of,
    is_public,
    parse_address,
    peer_of,
    place_of,
    probe,
)
from collab_core.swarm.daemon import Daemon, free_port
from collab_core.swarm.directory import Directory, Peer
from collab_core.swarm.links import Links
from collab_core.swarm.names import friendly_name
from collab_core.swarm.presence import Presence
from collab_core.swarm.reachability import Answer, is_there
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import MAX_NAME_CHARS, Mode, PeerRecord, RecordValidator
from collab_core.telemetry.events import EventLog

logger = logging.getLogger(__name__)

EVERYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
LOOK_PERIOD_S = 2.0
RELAY_TIMEOUT_S = 8.0
JOIN_ATTEMPTS = 4  # with pauses of 1, 2 and 4 seconds between them
GOODBYE_TIMEOUT_S = 2.0
MAX_SILENT = 8  # peers that are gone, of whom we try again
MAX_REMEMBERED_EACH = 3  # addresses of one peer: a public one may not work from its own home


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
    """Only dial out. Otherwise we listen, ask others whether they can reach us, and stop listening if they cannot."""
    use_relay: bool = False
    """If nobody can connect to us, be reached through those we join by."""
    stays_direct: bool = False
    """Take part as if reachable whatever others say, and only tell: a run cannot do without its organiser's aux."""
    identity_path: Path | None = None
    """Key file; by default in the state folder."""
    name: str = ""
    """What others see; by default made from the peer ID."""


class OpenCalls(dict[Any, Any]):
    """Calls that somebody still waits for.

    hivemind 1.1.12 gives an answer to whoever is in this table. If that call was cancelled a moment before, it raises,
    and no answer is ever read again. So whoever does not wait any more is not in it.
    """

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


class Swarm(Directory):
    """This peer's place in the run's network: a directory that knows how to get into the DHT and stay there."""

    def __init__(self, config: SwarmConfig, folder: StateFolder, events: EventLog) -> None:
        if len(config.name) > MAX_NAME_CHARS or not config.name.isprintable():
            raise ConfigError(
                Code.BAD_OPTION,
                f"--name {config.name[:60]!r} is not a name others can be shown.",
                fix=f"Choose one of at most {MAX_NAME_CHARS} printable characters.",
            )
        if config.use_relay and (config.client_mode or config.announce_maddrs):
            raise ConfigError(
                Code.BAD_OPTION,
                "--use-relay is for peers that find out that nobody can reach them; it goes neither with --client-mode "
                "(nobody should) nor with --announce-maddrs (others can).",
                fix="Leave one of them out.",
            )
        self.config = config
        self._folder = folder
        self._identity_path = config.identity_path or folder.identity
        identity = Identity.load_or_create(self._identity_path)
        record = PeerRecord(
            name=config.name or friendly_name(identity.peer_id),
            role=config.role,
            mode="client" if config.client_mode else "direct",
            version=__version__,
            phase="joining",
            time=time.time(),
        )
        super().__init__(identity, record, Reactor(), events)
        self.on_new_peer = self._remember
        self.p2p: Any = None
        self.grant = ""
        """The organiser's signature under our peer ID, if we are one of their auxiliaries."""
        self._daemon: Daemon | None = None
        self._presence: Presence | None = None
        self._links: Links | None = None
        self._port = 0
        self._bootstrap: list[str] = []
        self._remembered: list[str] = []
        self._looking: asyncio.Task[None] | None = None
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
        presence = self._start("client" if self.config.client_mode else "direct")
        if self.reactor.run(presence.ask(self.bootstrap_peers, any(map(is_public, candidates)))):
            if presence.is_hidden and not self.config.stays_direct:
                self._hide()
            self._tell_reachability(presence)
        self._update_record()
        self._remember_place()

    def _start(self, mode: Mode) -> Presence:
        """Start the daemon; or start it again, as it cannot change how it listens while it runs."""
        if self._daemon is not None:
            self.reactor.run(self.p2p.shutdown(), timeout_s=5)
            self._daemon.stop()
        self._daemon = self._start_daemon(mode)
        self._presence = self.reactor.run(self._start_transport(mode), timeout_s=30)
        return self._presence

    def _hide(self) -> None:
        """Nobody can connect to us: be reached through a relay if that is wished and somebody relays, or not at all."""
        if self.config.use_relay:
            presence = self._start("relay")
            deadline = time.monotonic() + RELAY_TIMEOUT_S
            while time.monotonic() < deadline:
                self.reactor.run(presence.look())
                if presence.now()[0] == "relay":
                    return
                time.sleep(0.1)
        self._start("client")

    def join(self, run_hash: bytes) -> None:
        """Enter the run's directory: from now on others hear of us, and we of them."""
        self._record = self._record.model_copy(update={"grant": self.grant})
        self.reactor.run(self._start_node(run_hash), timeout_s=60)

    @property
    def bootstrap_peers(self) -> list[str]:
        """IDs of the peers we reached when we connected."""
        return list(dict.fromkeys(peer_of(address) for address in self._bootstrap))

    @property
    def bootstrap_addresses(self) -> list[str]:
        """Where we found them."""
        return list(self._bootstrap)

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def addresses(self) -> list[str]:
        """Where others can reach us, the most public first; nothing in client mode."""
        return list(self._record.addresses)

    @property
    def port(self) -> int:
        """Where we listen; 0 in client mode."""
        return self._port

    def ask_to_dial_back(self) -> list[Answer]:
        """What those we reached find when they dial us, whatever we do about it."""
        assert self._presence is not None
        return self.reactor.run(self._presence.dial_back.ask(self.bootstrap_peers, [self._port], set()))

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

    def _start_daemon(self, mode: Mode) -> Daemon:
        config = self.config
        for address in (*config.host_maddrs, *config.announce_maddrs):
            parse_address(address)
        wanted = self._port or (config.port if config.port is not None else (self._folder.read_port() or 0))

        hosts = config.host_maddrs or EVERYWHERE

        def start(port: int) -> Daemon:
            listen = []
            if mode != "client":
                # We choose the port, so that we know it whatever addresses are announced.
                self._port = port or free_port(hosts[0])
                listen = [_with_port(address, self._port) for address in hosts]
            return Daemon(
                identity=self._identity_path,
                listen=listen,
                announce=config.announce_maddrs,
                bootstrap=ipv4_if_any(self._bootstrap),
                client_mode=mode == "client",
                relays=self._bootstrap if mode == "relay" else (),
                is_relay=config.role == "aux",
            )

        try:
            return start(wanted)
        except SwarmError as error:
            if error.code is not Code.PORT_TAKEN or config.port is not None or not wanted:
                raise
        logger.warning("Port %d of the last time is taken; taking another one. The old invite will not work.", wanted)
        return start(0)

    async def _start_transport(self, mode: Mode) -> Presence:
        assert self._daemon is not None
        # Each peer keeps its sockets in its daemon's folder, which is removed with it.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{self._daemon.folder}/"
        self.p2p = await P2P.replicate(Multiaddr(self._daemon.control_address))
        self.p2p._client.control._pending_calls = OpenCalls()
        config = self.config
        should_ask = config.role != "observer" and not config.announce_maddrs
        presence = Presence(self.p2p, self.peer_id, mode, should_ask, config.stays_direct)
        await presence.start()
        return presence

    async def _start_node(self, run_hash: bytes) -> None:
        # A node ID that follows from the peer ID: a restarted peer is the same node in everyone's routing table.
        node_id = DHTID.generate(source=self.peer_id)
        try:
            node = await DHTNode.create(
                p2p=self.p2p,
                node_id=node_id,
                initial_peers=self._bootstrap or None,
                client_mode=not self._record.is_reachable,
                record_validator=RecordValidator(run_hash, get_dht_time),
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
        await self.start(node, self.p2p, run_hash, self.bootstrap_peers)
        self._links = Links(self.p2p, node, records=self._whereabouts, hints=self._memories, on_moved=self._on_moved)
        self._looking = asyncio.create_task(self._look_loop())

    def _remember_place(self) -> None:
        """For our next start, and for peers of the same run on this machine."""
        if self.config.role != "observer":
            if self._port:
                self._folder.write_port(self._port)
            self._folder.write_addresses(self.addresses)

    def close(self) -> None:
        """Say goodbye and leave nothing behind. Bounded, and safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.node is not None:
            with contextlib.suppress(Exception):  # a goodbye is a courtesy; nobody waits for it
                self.reactor.run(self.say_goodbye(), timeout_s=GOODBYE_TIMEOUT_S)
        self.reactor.close()
        if self._daemon is not None:
            self._daemon.stop()

    def check_alive(self) -> None:
        """Raise if the daemon died under us, or we are deaf to it: without it nothing works any more."""
        if self._daemon is None or self._is_closed:
            return
        control = self.p2p._client.control
        is_deaf = any(task is not None and task.done() for task in (control._read_task, control._write_task))
        if is_deaf or not self._daemon.is_alive():
            raise RunError(
                Code.DAEMON_FAILED,
                "The libp2p daemon of this peer ended unexpectedly.",
                fix="Start the peer again; it resumes from its state folder. If it repeats, check memory (dmesg).",
            )

    def _remember(self) -> None:
        """Keep the addresses of reachable peers for the next start."""
        addresses = [address for peer in self.peers() for address in _good_addresses(peer)[:MAX_REMEMBERED_EACH]]
        self._remembered = list(dict.fromkeys([*addresses, *self._remembered]))[:MAX_REMEMBERED_PEERS]
        try:
            self._folder.write_peers(self._remembered)
        except OSError as error:
            logger.warning("Cannot remember peers: %s", error)

    # --- staying in touch ---

    def is_connected(self, peer_id: str) -> bool:
        """Whether there is a connection with a peer, whoever made it."""
        return self._links is not None and peer_id in self._links.connected

    def is_missing(self, peer_id: str) -> bool:
        """Whether a peer is as good as gone for us: no connection, and none to be had. Its record may live on a while.

        Whoever could reach us would have a connection, so a round that we lead need not wait for it.
        """
        return self._links is not None and peer_id in self._links.missing

    async def reach(self, peer_id: str) -> None:
        """Connect to a peer we heard of, if we are not connected yet; whoever needs it next sees whether it worked."""
        addresses = self._whereabouts().get(peer_id)
        if self._links is not None and addresses and not self.is_connected(peer_id):
            await self._links.dial(peer_id, addresses)

    async def answers(self, peer_id: str) -> bool:
        """Whether a peer is where it says it is, asked by a connection of our own, whatever the daemon thinks."""
        places = [host_and_port(address) for address in self._whereabouts().get(peer_id, ())]
        found = await asyncio.gather(*(is_there(peer_id, *place) for place in places if place is not None))
        return any(found)

    def _whereabouts(self) -> dict[str, list[str]]:
        """Where everyone who can be reached says to be."""
        return {peer.peer_id: addresses for peer in self.peers() if (addresses := _good_addresses(peer))}

    def _memories(self) -> list[str]:
        """Where those we joined by were, and those we met and hear nothing of."""
        known = self._whereabouts()
        silent = [address for address in self._remembered[:MAX_SILENT] if peer_of(address) not in known]
        return [address for address in (*self.config.initial_peers, *silent) if peer_of(address) != self.peer_id]

    def _on_moved(self, old: str, new: str) -> None:
        assert self._presence is not None
        self.events.write("address_changed", old=old, new=new)
        self._presence.move(old, new)
        self._update_record()

    async def _look_loop(self) -> None:
        """Look after our connections and our own addresses: the aux that restarted finds us still here."""
        while True:  # at once: only who saw where its connections began notices a move
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - the next round looks again
                logger.info("looking after our connections failed: %r", error)
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _look(self) -> None:
        assert self._links is not None
        assert self._presence is not None
        await self._links.look()
        has_moved = await self._presence.look()
        near = sorted(self._links.connected, key=lambda peer_id: peer_id not in self.bootstrap_peers)
        places = [*self._memories(), *(place for places in self._whereabouts().values() for place in places)]
        if await self._presence.ask(near, any(map(is_public, places))):
            self._tell_reachability(self._presence)
        elif not has_moved:
            return
        self._update_record()
        self._remember_place()

    def _update_record(self) -> None:
        """Tell others how and where we can be reached now.

        Our DHT node stays what it was: whoever we are connected to can use it, and hivemind 1.1.12 stops storing (an
        assertion) if a node that others know as one of theirs no longer gives its ID.
        """
        assert self._presence is not None
        mode, addresses = self._presence.now()
        self.publish(mode=mode, addresses=addresses)

    def _tell_reachability(self, presence: Presence) -> None:
        answers = presence.answers
        self.events.write(
            "reachability",
            is_reachable=not presence.is_hidden,
            mode=self._presence.now()[0] if self._presence is not None else presence.mode,
            port=self._port,
            asked=[answer.asked for answer in answers],
            reached=sorted({place_of(*place) for answer in answers for place in answer.reached}),
            missed=sorted({place_of(*place) for answer in answers for place in answer.missed}),
        )


def _good_addresses(peer: Peer) -> list[str]:
    """Where a peer says it is, as far as that makes sense."""
    return [address for address in peer.record.addresses if is_address_of(address, peer.peer_id)]


def _with_port(address: str, port: int) -> str:
    """`/ip4/0.0.0.0/tcp/0` listens on the wanted port; an address that names a port keeps it."""
    head, _, last = address.rpartition("/")
    return f"{head}/{port}" if last == "0" else address
