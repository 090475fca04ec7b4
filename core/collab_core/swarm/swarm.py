"""One class owns our place in the network: the transport, the DHT node, the directory of peers; and keeps us in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.timed_storage import get_dht_time

from collab_core import __version__
from collab_core.errors import Code, ConfigError, SwarmError
from collab_core.identity import Identity
from collab_core.state.folder import MAX_REMEMBERED_PEERS, StateFolder
from collab_core.swarm.addresses import (
    host_and_port,
    is_address_of,
    is_public,
    peer_of,
    place_of,
    probe,
)
from collab_core.swarm.config import SwarmConfig
from collab_core.swarm.directory import Directory, Peer
from collab_core.swarm.links import Links
from collab_core.swarm.names import friendly_name
from collab_core.swarm.presence import Presence
from collab_core.swarm.reachability import Answer, is_there
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import MAX_NAME_CHARS, PeerRecord, RecordValidator
from collab_core.swarm.transport import Transport
from collab_core.telemetry.events import EventLog

logger = logging.getLogger(__name__)

FIRST_LOOK_S, LOOK_EVERY_S = 3.0, 0.1  # how long a newcomer looks for others before it believes to be the first
LOOK_PERIOD_S = 2.0
RELAY_VERDICT_S = 12.0
JOIN_ATTEMPTS = 4  # with pauses of 1, 2 and 4 seconds between them
GOODBYE_TIMEOUT_S = 2.0
MAX_SILENT = 8  # peers that are gone, of whom we try again
MAX_REMEMBERED_EACH = 3  # addresses of one peer: a public one may not work from its own home


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
        self._transport = Transport(config, folder, self._identity_path, identity.peer_id, self.reactor, events)
        self.grant = ""
        """The organiser's signature under our peer ID, if we are one of their auxiliaries."""
        self._presence: Presence | None = None
        self._links: Links | None = None
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
        presence = self._transport.start("client" if self.config.client_mode else "direct", self._bootstrap)
        self._presence = presence
        if self._ask(presence, is_run_public=any(map(is_public, candidates))):
            if presence.is_hidden and not self.config.stays_direct:
                self._presence = self._transport.hide(self._bootstrap)
            self._tell_reachability(presence)
        self._update_record()
        self._remember_place()

    def _ask(self, presence: Presence, *, is_run_public: bool) -> bool:
        """Whether others told if they can reach us. Only now can we still choose a relay, so that is worth waiting."""
        deadline = time.monotonic() + (RELAY_VERDICT_S if self.config.use_relay else 0.0)
        while not (has_told := self.reactor.run(presence.ask(self.bootstrap_peers, is_run_public))):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        return has_told

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
    def p2p(self) -> Any:
        """hivemind's end of our daemon."""
        return self._transport.p2p

    @property
    def port(self) -> int:
        """Where we listen; 0 in client mode."""
        return self._transport.port

    def ask_to_dial_back(self) -> list[Answer]:
        """What those we reached find when they dial us, whatever we do about it."""
        assert self._presence is not None
        return self.reactor.run(self._presence.dial_back.ask(self.bootstrap_peers, [self.port], set()))

    def _candidates(self) -> list[str]:
        """Everyone we could join through: those we were told of, then those we met before."""
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
            if self.port:
                self._folder.write_port(self.port)
            self._folder.write_addresses(self.addresses)

    def close(self) -> None:
        """Say goodbye and leave nothing behind. Bounded, and safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.node is not None:
            with contextlib.suppress(Exception):  # a goodbye is a courtesy; nobody waits for it
                self.reactor.run(self.say_goodbye(), timeout_s=GOODBYE_TIMEOUT_S)
        try:
            self.reactor.close()
        finally:
            self._transport.stop()  # which also wakes threads that still wait for it

    def check_alive(self) -> None:
        """Raise if the daemon died under us, or we are deaf to it: without it nothing works any more."""
        if not self._is_closed:
            self._transport.check_alive()

    def _remember(self) -> None:
        """Keep the addresses of reachable peers for the next start."""
        addresses = [address for peer in self.peers() for address in _good_addresses(peer)[:MAX_REMEMBERED_EACH]]
        self._remembered = list(dict.fromkeys([*addresses, *self._remembered]))[:MAX_REMEMBERED_PEERS]
        try:
            self._folder.write_peers(self._remembered)
        except OSError as error:
            logger.warning("Cannot remember peers: %s", error)

    # --- staying in touch ---

    def look_around(self, is_enough: Callable[[], bool], stop: threading.Event) -> None:
        """Hear who is there before deciding that nobody is, and how far they are.

        Whoever is known already is asked again: what the DHT told us while we joined may be from many epochs ago.
        """
        deadline = time.monotonic() + FIRST_LOOK_S
        while self._bootstrap and not stop.is_set():
            if (self.refresh(is_new=True) and is_enough()) or time.monotonic() > deadline:
                break
            stop.wait(LOOK_EVERY_S)

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
            port=self.port,
            wants_relay=self.config.use_relay,
            asked=[answer.asked for answer in answers],
            reached=sorted({place_of(*place) for answer in answers for place in answer.reached}),
            missed=sorted({place_of(*place) for answer in answers for place in answer.missed}),
        )


def _good_addresses(peer: Peer) -> list[str]:
    """Where a peer says it is, as far as that makes sense."""
    return [address for address in peer.record.addresses if is_address_of(address, peer.peer_id)]
