"""One exchange between two peers, from either side, as far as the decision. See `wire` for who says what.

The rule: the asked side decides, once the asker holds everything. Until it says READY, an asker may drop the exchange
at any time; until it hears READY, so may the asked. From READY on the asker does not know what became of it until it
is told: it is in doubt, and asks again and again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from collab_core.gossip.mean import Share, weighted_mean
from collab_core.gossip.wire import Acceptance, BadFrame, Brought, Kind, Offer, Refusal, Wire, unpack

MOST_TIMES_LARGER = 1e6  # than our own largest value: a model that was ever trained has none like that


class Faults(Protocol):
    """Faults on purpose, for tests: told of every stage, and may end the process or raise."""

    def reached(self, stage: str, epoch: int) -> None: ...


class Busy(Exception):
    """The other side is meeting somebody else."""


class Refused(Exception):
    """We broke a rule, the other side says."""


class BrokenRule(Exception):
    """The other side broke a rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What every meeting of this peer keeps to."""

    layout: bytes
    num_values: int
    weight: float
    weight_cap: float
    patience_s: float
    """For an answer."""
    transfer_s: float
    """For a whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An exchange that was decided: the average in place of the old value, in our model as in the partner's."""

    exchange: str
    partner: str
    epoch: int
    """Our round, when it began."""
    rounds: int
    """How many rounds forward we are with the average, or backward."""
    is_asker: bool
    old: torch.Tensor
    average: torch.Tensor
    partner_weight: float
    seconds: float
    bytes_sent: int
    bytes_received: int


@dataclass(slots=True)
class Encounter:
    """An exchange that is under way. Lives in the reactor's thread."""

    exchange: str
    partner: str
    is_asker: bool
    terms: Terms
    reached: Callable[[str], None]
    """Told of every stage."""
    epoch: int
    is_training: bool
    """Whether our round may change."""
    plausible: Callable[[int, int], int]
    """What we make of the round that the other side says it is in, beside our own."""
    is_in_doubt: bool = False
    """We, the asker, said READY, or were about to, and have not heard what came of it."""
    is_dropped: bool = False
    """We, the asked, were asked what became of it before we had decided: nothing."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)

    async def agree(self, wire: Wire, mine: Share) -> Change:
        """The asker's side, up to the moment when it could say READY."""
        terms = self.terms
        self.reached("ask-offer")
        offer = Offer(
            exchange=bytes.fromhex(self.exchange), layout=terms.layout, weight=terms.weight, epoch=self._told_epoch
        )
        await wire.say(Kind.OFFER, offer)
        kind, data = await wire.hear(Kind.ACCEPT, Kind.BUSY, Kind.REFUSED, within_s=terms.patience_s)
        if kind is Kind.BUSY:
            raise Busy
        if kind is Kind.REFUSED:
            raise Refused(unpack(Refusal, data).reason)
        acceptance = unpack(Acceptance, data)
        self.check(acceptance)
        self.reached("ask-accepted")
        change = await self._swap(wire, mine, acceptance)
        self.reached("ask-swapped")
        return change

    async def settle(self, wire: Wire) -> bool:
        """The asker's side from READY on: whether the exchange was committed. Anything raised leaves it in doubt."""
        self.is_in_doubt = True
        self.reached("ask-ready")
        await wire.say(Kind.READY)
        self.reached("ask-told")
        kind, _ = await wire.hear(Kind.COMMITTED, Kind.ABORTED, within_s=self.terms.patience_s)
        self.reached("ask-heard")
        self.is_in_doubt = False
        return kind is Kind.COMMITTED

    async def accept(self, wire: Wire, mine: Share, offer: Offer) -> Change:
        """The asked side, up to the moment when it may decide."""
        self.reached("answer-offered")
        await wire.say(Kind.ACCEPT, Acceptance(weight=self.terms.weight, epoch=self._told_epoch))
        self.reached("answer-accepted")
        change = await self._swap(wire, mine, offer)
        self.reached("answer-swapped")
        await wire.hear(Kind.READY, within_s=self.terms.transfer_s)  # the asker may still be receiving
        self.reached("answer-ready")
        return change

    def check(self, theirs: Brought) -> None:
        """Whether we can meet on what the other side says of its model."""
        if theirs.weight > self.terms.weight_cap:
            raise BrokenRule(f"a weight of {theirs.weight:.3g}; at most {self.terms.weight_cap:.3g} is allowed")

    @property
    def _told_epoch(self) -> int | None:
        return self.epoch if self.is_training else None

    def _rounds(self, their_epoch: int | None) -> int:
        """To the mean of both rounds, whatever weighs more. Half a round goes to the asked, so the sum stays."""
        if their_epoch is None or not self.is_training:
            return 0
        theirs = self.plausible(their_epoch, self.epoch)
        return (self.epoch + theirs + (not self.is_asker)) // 2 - self.epoch

    async def _swap(self, wire: Wire, mine: Share, said: Brought) -> Change:
        """Both vectors at once; then the average."""
        terms = self.terms
        stage = "ask-halfway" if self.is_asker else "answer-halfway"
        sending = asyncio.ensure_future(wire.send_vector(mine.values, halfway=lambda: self.reached(stage)))
        receiving = asyncio.ensure_future(wire.receive_vector(terms.num_values, terms.transfer_s))
        both = (sending, receiving)
        try:
            await asyncio.wait(both, timeout=terms.transfer_s, return_when=asyncio.FIRST_EXCEPTION)
            if failed := [task for task in both if task.done() and task.exception() is not None]:
                await failed[0]
            if not all(task.done() for task in both):
                raise TimeoutError
        except BadFrame as error:
            raise BrokenRule(str(error)) from error
        finally:
            for task in both:
                task.cancel()
        theirs = Share(self.partner, receiving.result(), said.weight)
        average = await asyncio.to_thread(_checked_mean, mine, theirs)
        return Change(
            exchange=self.exchange,
            partner=self.partner,
            epoch=self.epoch,
            rounds=self._rounds(said.epoch),
            is_asker=self.is_asker,
            old=mine.values,
            average=average,
            partner_weight=said.weight,
            seconds=time.monotonic() - self.started,
            bytes_sent=wire.bytes_sent,
            bytes_received=wire.bytes_received,
        )


def _checked_mean(mine: Share, theirs: Share) -> torch.Tensor:
    if not bool(torch.isfinite(theirs.values).all()):
        raise BrokenRule("a model that is not finite")
    if _largest(theirs) > MOST_TIMES_LARGER * max(1.0, _largest(mine)):
        raise BrokenRule(f"a model with values as large as {_largest(theirs):.3g}")
    average = weighted_mean(mine, theirs)
    if not bool(torch.isfinite(average).all()):
        raise BrokenRule("a model whose values are too large to average with")
    return average


def _largest(share: Share) -> float:
    return float(share.values.abs().max()) if len(share.values) else 0.0


def in_words(error: Exception) -> str:
    """What went wrong with another peer, for the event log."""
    match error:
        case Refused():
            return f"it refused us: {error}"
        case asyncio.TimeoutError():
            return "it was silent for too long"
        case ConnectionError():
            return "the connection broke"
        case _:
            return f"it cannot be reached ({type(error).__name__})"
