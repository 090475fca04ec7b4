"""The arithmetic of one part that is reduced here: check what comes, add it up, encode the mean once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import Codec
from collab_core.averaging.feedback import Draft
from collab_core.averaging.group import Part
from collab_core.averaging.norms import squared_norm
from collab_core.averaging.robust import Reduce

T = TypeVar("T")


class Refused(Exception):
    """A sender broke the rules: its part enters no average, and it is banned for the round.

    Args:
        is_lie: no honest peer sends this, so it is kept out of the next rounds too.
    """

    def __init__(self, reason: str, *, is_lie: bool = True) -> None:
        super().__init__(reason)
        self.is_lie = is_lie


class PartLost(Exception):
    """Nobody's contribution to a part is left, or it cannot be reduced: there is no average of it."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the arithmetic of a round needs."""

    codec: Codec
    feedback: Draft
    buffers: Buffers
    thread: ThreadPoolExecutor
    reduce: Reduce | None = None
    """Of all contributions at once; None is the mean."""
    adds_up: bool = False
    """Contributions grow with the samples behind them."""

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do arithmetic off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)


@dataclass(slots=True)
class Sender:
    """What somebody declared that it would send here, and what is left of it."""

    weight: float
    norm: float = math.inf
    factor: float = 1.0
    """What its values are multiplied with, as its norm is much larger than most; its weight stays."""
    budget: float = math.inf
    """Squares of values that it may still send."""

    def spend(self, squared: float) -> None:
        """Raises Refused if it has sent more than it declared."""
        if squared > self.budget:
            raise Refused(f"exceeds the norm of {self.norm:.4g} that its sender declared")
        self.budget -= squared


class PartSum:
    """The weighted sum of one part. Its methods are the arithmetic, all in one thread.

    It grows where what the codec loses of it will be, on top of what was lost before: both are in units of samples.

    Args:
        own: this peer's own contribution to the part, if it has one.
        mine: what this peer declared.
        average: where the average goes.
    """

    def __init__(self, part: Part, own: torch.Tensor | None, mine: Sender, average: torch.Tensor) -> None:
        self.part, self.own, self.mine = part, own, mine
        self._average = average
        self.weight = 0.0
        self._has_begun = self._is_done = False

    def add(self, payload: bytearray, sender: Sender, limit: float, tools: Tools) -> None:
        """Take a sender's values, unless one is not finite or larger than `limit`, or they exceed its declaration."""
        values = tools.buffers.scratch("values", self.part.num_values)
        tools.codec.decode(payload, values)
        squared = squared_norm(values)  # one quick pass that bounds every value
        if not math.isfinite(squared):
            raise Refused("has values that are not finite")
        sender.spend(squared)
        if math.sqrt(squared) > limit and (bound := float(values.abs().max())) > limit:
            raise Refused(f"has values as large as {bound:.3g}", is_lie=False)
        if not self._is_done:  # otherwise it was given up before it came
            self.take(payload, values, sender, tools)

    def take(self, payload: bytearray, values: torch.Tensor, sender: Sender, tools: Tools) -> None:
        """Add values that were found to be good."""
        self.begin(tools.feedback)
        tools.feedback.sum(self.part).add_(values, alpha=sender.weight * sender.factor)
        self.weight += sender.weight
        tools.buffers.give_back(payload)

    def begin(self, feedback: Draft) -> None:
        """Take our own contribution in, so that its memory is free for the next one."""
        if not self._has_begun and not self._is_done:
            self._has_begun = True
            self.weight += self.mine.weight if self.own is not None else 0.0
            self.begin_sum(feedback)

    def begin_sum(self, feedback: Draft) -> None:
        """What a sum begins with."""
        feedback.begin_sum(self.part, self.own, self.mine.weight * self.mine.factor)

    def total(self, tools: Tools) -> torch.Tensor:
        """The sum of everything that came."""
        return tools.feedback.sum(self.part)

    def finish(self, payload: bytearray, tools: Tools) -> None:
        """Encode the mean, once; the average is what everyone decodes from it."""
        assert not self._is_done, "a part is finished once"
        self.begin(tools.feedback)
        self._is_done = True
        if self.weight == 0:
            raise PartLost("no contribution to a part was left")
        total = self.total(tools)
        mean = torch.div(total, self.weight, out=tools.buffers.scratch("values", self.part.num_values))
        if not tools.codec.for_averages.encode(mean, payload, self._average):
            raise PartLost("a part reduced here is not finite")
        if not tools.codec.for_averages.is_lossless:
            tools.feedback.end_sum(self.part, self._average, self.weight)
