"""Where others find us: our addresses, and whether they can reach us there at all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collab_core.swarm.addresses import best_first, host_and_port, is_relayed, place_of, without_loopback
from collab_core.swarm.reachability import Answer, DialBack, verdict
from collab_core.swarm.record import Mode

ASK_PERIOD_S = 6.0  # until somebody tells
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
    _next_question: float = 0.0

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
        before, self._addresses = self._addresses, sorted(visible)
        has_changed = before != self._addresses
        if has_changed:
            self.forget()
        return has_changed

    def forget(self) -> None:
        """We moved: ask again."""
        self.is_hidden, self.answers, self._next_question = None, (), 0.0

    async def ask(self, peer_ids: Sequence[str]) -> bool:
        """Ask others to dial us back, if it is not known yet. Whether they told us something new."""
        now = time.monotonic()
        places = [host_and_port(address) for address in self._addresses if not is_relayed(address)]
        ports = list(dict.fromkeys(place[1] for place in places if place is not None))
        is_due = self.should_ask and self.is_hidden is None and now >= self._next_question
        if self.mode != "direct" or not is_due or not peer_ids or not ports:
            return False
        self._next_question = now + ASK_PERIOD_S
        self.answers = await self.dial_back.ask(peer_ids, ports)
        found = verdict(self.answers)
        self.is_hidden = None if found is None else not found
        return found is not None

    def now(self) -> tuple[Mode, list[str]]:
        """What to tell others: how we can be reached, and where; the most public address first."""
        reached = [f"{place_of(*place)}/p2p/{self.peer_id}" for answer in self.answers for place in answer.reached]
        addresses = without_loopback(best_first([*self._addresses, *reached]))[:MAX_ADDRESSES]
        if self.mode == "direct" and (self.stays_direct or not self.is_hidden):
            return "direct", addresses
        if self.mode == "relay" and any(map(is_relayed, addresses)):
            return "relay", addresses
        return "client", []
