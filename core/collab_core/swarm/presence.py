"""Where others find us: our addresses, and whether they can reach us there at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collab_core.swarm.addresses import (
    best_first,
    host_and_port,
    is_public,
    is_relayed,
    peer_of,
    place_of,
    without_loopback,
)
from collab_core.swarm.reachability import MAX_ASKED, MIN_GAP_S, Answer, DialBack, verdict
from collab_core.swarm.record import Mode

MIN_ASK_PAUSE_S, MAX_ASK_PAUSE_S = 4.0, 120.0  # until somebody tells
MAX_ADDRESSES = 8


@dataclass(slots=True)
class Presence:
    """Our place in the network as one daemon gives it. Runs in the reactor's thread."""

    p2p: Any
    peer_id: str
    mode: Mode
    """How the daemon was started: a client does not even listen."""
    should_ask: bool
    """Whether to find out if others can reach us; not if a person said so."""
    stays_direct: bool
    dial_back: DialBack = field(init=False)
    is_hidden: bool | None = None
    """Others cannot connect to us; None until somebody told."""
    answers: Sequence[Answer] = ()
    _addresses: list[str] = field(default_factory=list)
    _moves: dict[str, str] = field(default_factory=dict)
    """Where we moved from and to, until the daemon has noticed."""
    _left: set[str] = field(default_factory=set)
    """Hosts we were at before we moved."""
    _asked: set[str] = field(default_factory=set)
    """Whom we asked since we moved."""
    _last_question: float = -MIN_GAP_S
    _next_question: float = 0.0
    _pause_s: float = MIN_ASK_PAUSE_S

    async def start(self) -> None:
        """Answer others who ask whether we can reach them, and look where we are ourselves."""
        self.dial_back = DialBack(self.p2p)
        await self.dial_back.listen()
        await self.look()

    async def look(self) -> bool:
        """Whether our addresses changed since the last look; then nothing is known about who can reach us."""
        if self.mode == "client":
            return False
        try:
            visible = [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # no addresses: this machine is cut off
            visible = []
        hosts = _hosts(visible)
        self._moves = {old: new for old, new in self._moves.items() if old in hosts}
        return self._set(sorted({_moved(address, self._moves) for address in visible}))

    def move(self, old: str, new: str) -> None:
        """Our packets leave from another address now. The daemon needs up to 5 s to see it; others should not wait."""
        moves = {**self._moves, old: old}  # where we were before that, we left for this one too; where we are, we are
        self._moves = {left: new if gone == old else gone for left, gone in moves.items() if left != new}
        self._set(sorted({_moved(address, self._moves) for address in self._addresses}))
        self._left = (self._left | {old}) - {new}
        self._forget()

    def _set(self, addresses: list[str]) -> bool:
        before, self._addresses = self._addresses, addresses
        if before == addresses:
            return False
        self._left = (self._left | _hosts(before)) - _hosts(addresses)
        self._forget()
        return True

    def _forget(self) -> None:
        self.is_hidden, self.answers = None, ()
        self._next_question, self._pause_s = 0.0, MIN_ASK_PAUSE_S
        self._asked = set()

    async def ask(self, peer_ids: Sequence[str], is_run_public: bool) -> bool:
        """Ask others to dial us back, if it is not known yet. Whether they told us something new.

        Args:
            peer_ids: whom we could ask, best first.
            is_run_public: some peers have public addresses, so that it is not enough to be reached at home.
        """
        now = time.monotonic()
        places = [host_and_port(address) for address in self._addresses if not is_relayed(address)]
        ports = list(dict.fromkeys(place[1] for place in places if place is not None))
        if self.mode != "direct" or not self.should_ask or self.is_hidden is not None or not peer_ids or not ports:
            return False
        news = set(peer_ids[:MAX_ASKED]) - self._asked
        if now < (self._last_question + MIN_GAP_S if news else self._next_question):
            return False
        self._asked |= news
        self._last_question = now
        self._next_question, self._pause_s = now + self._pause_s, min(2 * self._pause_s, MAX_ASK_PAUSE_S)
        self.answers = await self.dial_back.ask(peer_ids, ports, self._left)
        found = verdict(self.answers)
        reached = [place_of(*place) for answer in self.answers for place in answer.reached]
        if found is None or (found and is_run_public and not any(map(is_public, reached))):
            return False
        self.is_hidden = not found
        return True

    def now(self) -> tuple[Mode, list[str]]:
        """What to tell others: how we can be reached, and where; the most public address first."""
        reached = [f"{place_of(*place)}/p2p/{self.peer_id}" for answer in self.answers for place in answer.reached]
        addresses = without_loopback(best_first([*self._addresses, *reached]))[:MAX_ADDRESSES]
        if self.mode == "direct" and (self.stays_direct or not self.is_hidden):
            return "direct", addresses
        if self.mode == "relay" and any(map(is_relayed, addresses)):
            return "relay", addresses
        return "client", []


def _hosts(addresses: Sequence[str]) -> set[str]:
    places = (host_and_port(address) for address in addresses if not is_relayed(address))
    return {place[0] for place in places if place is not None}


def _moved(address: str, moves: Mapping[str, str]) -> str:
    place = host_and_port(address)
    if place is None or is_relayed(address) or place[0] not in moves:
        return address
    return f"{place_of(moves[place[0]], place[1])}/p2p/{peer_of(address)}"
