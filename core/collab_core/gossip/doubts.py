"""Exchanges that were cut off after we had said READY: only the partner knows what became of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from collab_core.gossip.encounter import Change
from collab_core.swarm import Swarm

logger = logging.getLogger(__name__)

COMMITTED, ABORTED = b"committed", b"aborted"
ASK_AGAIN_S = 1.0
GONE_S = 600.0  # how long a partner's record must be gone before nobody waits for its answer any more
GIVE_UP_S = 3600.0  # and if it is there, but never answers
MAX_DOUBTS = 4  # each holds two models in memory


class Doubts:
    """Asks until the partner tells, or is gone for good. Runs in the reactor's thread.

    Meanwhile the peer trains, and meets others: what the exchange adds to its model, and to the partner's, can be added
    at any time.

    Args:
        swarm: who is there.
        question: asks a change's partner; whatever it raises, it is asked again.
        commit: called for a change that the partner has committed.
        forget: called with an exchange that came to nothing.
        gone_s: see `GONE_S`.
    """

    def __init__(
        self,
        swarm: Swarm,
        *,
        question: Callable[[Change], Awaitable[bytes]],
        commit: Callable[[Change], None],
        forget: Callable[[str], Awaitable[None]],
        gone_s: float = GONE_S,
    ) -> None:
        self._swarm, self._question, self._commit, self._forget = swarm, question, commit, forget
        self._gone_s = gone_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._partners: dict[str, str] = {}

    def __contains__(self, exchange: str) -> bool:
        return exchange in self._tasks

    def concern(self, partner: str) -> bool:
        """Whether it is not yet known what became of an exchange with this peer."""
        return partner in self._partners.values()

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= MAX_DOUBTS

    def add(self, change: Change) -> None:
        name = self._swarm.name_of(change.partner)
        self._swarm.events.write(
            "exchange_in_doubt", exchange=change.exchange, peer_id=change.partner, name=name, epoch=change.epoch
        )
        self._partners[change.exchange] = change.partner
        self._tasks[change.exchange] = asyncio.create_task(self._settle(change))

    async def settled(self) -> None:
        """Wait until nothing is in doubt any more."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _settle(self, change: Change) -> None:
        outcome = b""
        try:
            outcome = await self._ask(change)
        finally:  # also if we leave before we know
            del self._tasks[change.exchange], self._partners[change.exchange]
            if outcome == COMMITTED:
                self._commit(change)
            self._tell(change, outcome)
        if outcome != COMMITTED:
            await self._forget(change.exchange)

    async def _ask(self, change: Change) -> bytes:
        last_seen = time.monotonic()
        latest = last_seen + GIVE_UP_S
        while True:
            try:
                outcome = await self._question(change)
                if outcome in (COMMITTED, ABORTED):
                    return outcome
            except Exception as error:  # noqa: BLE001 - it may be restarting, or the link is still cut
                logger.info("%s does not say what became of %s: %r", change.partner, change.exchange, error)
            if any(peer.peer_id == change.partner for peer in self._swarm.peers()):
                last_seen = time.monotonic()
            if time.monotonic() > min(last_seen + self._gone_s, latest):
                return b""
            await asyncio.sleep(ASK_AGAIN_S)

    def _tell(self, change: Change, outcome: bytes) -> None:
        name = self._swarm.name_of(change.partner)
        if outcome:
            self._swarm.events.write(
                "exchange_settled",
                exchange=change.exchange,
                peer_id=change.partner,
                name=name,
                outcome=outcome.decode(),
            )
        else:
            reason = "we left, or the partner is gone, before it told what became of it"
            self._swarm.events.write(
                "exchange_lost", exchange=change.exchange, peer_id=change.partner, name=name, reason=reason
            )
