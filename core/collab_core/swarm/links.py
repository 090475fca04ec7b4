"""Staying connected: whoever can be dialled is dialled again when we lose them, when they move, and when we move."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hivemind.p2p import PeerID

from collab_core.swarm.addresses import (
    dialable,
    host_and_port,
    ipv4_if_any,
    is_loopback,
    is_relayed,
    peer_of,
    source_towards,
)

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
MIN_PAUSE_S, MAX_PAUSE_S = 2.0, 8.0  # between two attempts to reach somebody who is away
MAX_STRANGER_PAUSE_S = 120.0  # whom we never reached may not be where its record says, and somebody else may be
MAX_TARGETS = 64
PING_PROTOCOL, PING, PING_TIMEOUT_S = "/ipfs/ping/1.0.0", bytes(range(32)), 2.0


class Links:
    """Our connections to others. Everything here runs in the reactor's thread; what is public may be read from any."""

    def __init__(
        self,
        p2p: Any,
        node: Any,
        *,
        records: Callable[[], Mapping[str, Sequence[str]]],
        hints: Callable[[], Sequence[str]],
        on_moved: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            p2p: the transport.
            node: our DHT node.
            records: where everyone who can be reached says to be now, by peer ID.
            hints: addresses of peers to stay in touch with, whatever they say.
            on_moved: told the old and the new address of this machine.
        """
        self._p2p, self._node, self._records, self._hints, self._on_moved = p2p, node, records, hints, on_moved
        self.connected: Mapping[str, frozenset[str]] = {}
        """Peers we have a connection with, and where it leads."""
        self.missing: frozenset[str] = frozenset()
        """Peers that should be there, but have no connection with us and did not take one when we last tried."""
        self._sources: dict[tuple[str, str], str] = {}
        self._told: dict[str, set[str]] = {}
        self._left: dict[str, set[str]] = {}
        """Hosts that peers left, as long as we have a connection there."""
        self._met: set[str] = set()
        self._pauses: dict[str, float] = {}
        self._next_try: dict[str, float] = {}

    async def look(self) -> None:
        """Find out whom we lost, and dial them."""
        await self._list()
        records = self._records()
        targets = self._targets(records)
        self._met = (self._met | self.connected.keys() | set(map(peer_of, self._hints()))) & targets.keys()
        self._after_their_move(records)
        if leave := self._after_our_move(targets) | await self._dead():
            await asyncio.gather(*(self._disconnect(peer_id) for peer_id in leave))
            self._pauses.clear()
            self._next_try.clear()
            await self._list()
        # Connected is not enough: a peer that was away is gone from our DHT routing table until it is pinged.
        routed = {peer_id.to_base58() for peer_id in self._node.protocol.routing_table.uid_to_peer_id.values()}
        now = asyncio.get_running_loop().time()
        missed = [
            peer_id
            for peer_id in targets
            if (peer_id not in self.connected or peer_id not in routed) and self._next_try.get(peer_id, 0.0) <= now
        ]
        if missed:
            await asyncio.gather(*(self.dial(peer_id, targets[peer_id]) for peer_id in missed))
            await self._list()
        self.missing = frozenset(self._pauses.keys() - self.connected.keys())

    def _targets(self, records: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Whom to be connected to: where they say they are, then where we were told."""
        targets = {peer_id: list(addresses) for peer_id, addresses in list(records.items())[:MAX_TARGETS]}
        for address in self._hints():
            known = targets.setdefault(peer_of(address), [])
            if address not in known:
                known.append(address)
        return targets

    async def _list(self) -> None:
        """Raises if the daemon does not answer."""
        found: dict[str, frozenset[str]] = {}
        for info in await asyncio.wait_for(self._p2p.list_peers(), timeout=CALL_TIMEOUT_S):
            peer_id = info.peer_id.to_base58()
            found[peer_id] = found.get(peer_id, frozenset()) | {str(address) for address in info.addrs}
        self.connected = found

    def _after_our_move(self, targets: Mapping[str, Sequence[str]]) -> set[str]:
        """Peers our packets now leave for from another address: what we had with them is dead, though TCP would need
        minutes to say so."""
        connected = {(peer_id, host) for peer_id, addresses in self.connected.items() for host in _hosts(addresses)}
        # Whom we lost since the last look, we may have lost because we moved.
        ends = connected | {end for end in self._sources if end[0] in targets}
        hosts = {host for _, host in ends} | {host for addresses in targets.values() for host in _hosts(addresses)}
        ways = {host: source_towards(host) for host in hosts}
        here = next((source for source in ways.values() if source and not is_loopback(source)), None)
        before = {end: self._sources[end] for end in ends if end in self._sources}
        # If there is no way to anybody, there is nothing to do: perhaps it comes back as it was.
        moved = {
            end
            for end, source in before.items()
            if here is not None and ways[end[1]] != source and (end in connected or ways[end[1]])
        }
        self._sources = {end: source for end in ends if (source := ways[end[1]] or before.get(end))}
        for old, new in {(before[end], ways[end[1]] or here) for end in moved}:
            if new is not None:
                self._on_moved(old, new)
        return {peer_id for peer_id, _ in moved}

    def _after_their_move(self, records: Mapping[str, Sequence[str]]) -> None:
        """Peers that say they left the place where a connection of ours with them leads: it is dead."""
        for peer_id, addresses in records.items():
            told = _hosts(addresses)
            gone = self._told.get(peer_id, told) - told
            self._told[peer_id] = told
            self._left[peer_id] = (self._left.get(peer_id, set()) | gone) - told
        self._left = {peer_id: left for peer_id, left in self._left.items() if left & self._ends(peer_id)}

    async def _dead(self) -> set[str]:
        """Of those who moved, peers our daemon cannot talk to: it may go on using the dead connection for half a minute
        though there is a new one. Nobody is hung up on without need: when both sides dial again at the same moment,
        their handshakes collide."""
        suspects = list(self._left)
        answers = await asyncio.gather(*(self._answers(peer_id) for peer_id in suspects))
        return {peer_id for peer_id, is_well in zip(suspects, answers, strict=True) if not is_well}

    async def _answers(self, peer_id: str) -> bool:
        """libp2p's own ping, which the other's daemon answers however busy the peer is."""
        try:
            return await asyncio.wait_for(self._ping(PeerID.from_base58(peer_id)), PING_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the connection, it does not work
            logger.info("%s moved and does not answer on the old connection: %r", peer_id, error)
            return False

    async def _ping(self, remote: PeerID) -> bool:
        _, reader, writer = await self._p2p._client.stream_open(remote, (PING_PROTOCOL,))
        try:
            writer.write(PING)
            return bool(await reader.readexactly(len(PING)) == PING)
        finally:
            writer.close()

    def _ends(self, peer_id: str) -> set[str]:
        return _hosts(address for address in self.connected.get(peer_id, ()) if not is_relayed(address))

    async def _disconnect(self, peer_id: str) -> None:
        try:
            await asyncio.wait_for(self._p2p._client.disconnect(PeerID.from_base58(peer_id)), CALL_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - then it will notice by itself, only later
            logger.info("the old connection to %s cannot be closed: %r", peer_id, error)

    async def _connect(self, remote: PeerID, addresses: Sequence[str]) -> None:
        """Over IPv4 if that works, over anything otherwise."""
        best = ipv4_if_any(addresses)
        for choice in (best, addresses):
            call = self._p2p._client.connect(remote, [dialable(address) for address in choice])
            try:
                await asyncio.wait_for(call, timeout=CALL_TIMEOUT_S)
                return
            except Exception:
                if len(choice) == len(addresses):
                    raise

    async def dial(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to a peer. Never raises: `look` tries again."""
        remote = PeerID.from_base58(peer_id)
        try:
            if peer_id not in self.connected:
                await self._connect(remote, addresses)
            await asyncio.wait_for(self._node.protocol.call_ping(remote), timeout=CALL_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - still away: we try again, less and less often
            logger.info("%s cannot be reached yet at %s: %r", peer_id, ", ".join(addresses), error)
            longest_s = MAX_PAUSE_S if peer_id in self._met else MAX_STRANGER_PAUSE_S
            pause_s = min(2 * self._pauses.get(peer_id, MIN_PAUSE_S / 2), longest_s)
            self._pauses[peer_id] = pause_s
            self._next_try[peer_id] = asyncio.get_running_loop().time() + pause_s
            return
        self._pauses.pop(peer_id, None)
        self._next_try.pop(peer_id, None)


def _hosts(addresses: Iterable[str]) -> set[str]:
    return {place[0] for place in map(host_and_port, addresses) if place is not None}
