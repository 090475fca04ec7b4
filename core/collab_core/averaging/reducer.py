"""What a peer does for the others in a round: average its parts over everyone who sends, refuse what is wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import Codec, largest
from collab_core.averaging.feedback import Draft
from collab_core.averaging.group import Part

LARGEST_SUM = 1e37

T = TypeVar("T")


class Refused(Exception):
    """A sender broke the rules: its part enters no average, and it is banned for the round."""


class PartLost(Exception):
    """Nobody's contribution to a part is left, or it cannot be reduced: there is no average of it."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the arithmetic of a round needs."""

    codec: Codec
    feedback: Draft
    buffers: Buffers
    thread: ThreadPoolExecutor

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do arithmetic off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)


class PartSum:
    """The weighted sum of one part. Its methods are the arithmetic, all in one thread.

    It grows where what the codec loses of it will be, on top of what was lost before: both are in units of samples.
    """

    def __init__(self, part: Part, own: torch.Tensor | None, own_weight: float, average: torch.Tensor) -> None:
        self._part, self._average = part, average
        self._own: torch.Tensor | None = own
        self._own_weight = own_weight
        self._weight = 0.0
        self._has_begun = self._is_done = False

    def add(self, payload: bytearray, weight: float, limit: float, tools: Tools) -> None:
        """Add a sender's values, unless one of them is not finite or larger than `limit`."""
        values = tools.buffers.scratch("values", self._part.num_values)
        tools.codec.decode(payload, values)
        bound = largest(values)
        if bound > limit:  # the bound is of all values together; is any single one too large?
            bound = float(values.abs().max())
        if not math.isfinite(bound):
            raise Refused("has values that are not finite")
        if bound > limit:
            raise Refused(f"has values as large as {bound:.3g}")
        if self._is_done:
            return  # it was given up before it came
        self._begin(tools.feedback).add_(values, alpha=weight)
        self._weight += weight

    def begin(self, feedback: Draft) -> None:
        """Take our own contribution in, so that its memory is free for the next one."""
        if not self._is_done:
            self._begin(feedback)

    def _begin(self, feedback: Draft) -> torch.Tensor:
        if not self._has_begun:
            self._has_begun = True
            feedback.begin_sum(self._part, self._own, self._own_weight)
            self._weight = self._own_weight if self._own is not None else 0.0
        return feedback.sum(self._part)

    def finish(self, payload: bytearray, tools: Tools) -> None:
        """Encode the mean, once; the average is what everyone decodes from it."""
        total = self._begin(tools.feedback)
        self._is_done = True
        if self._weight == 0:
            raise PartLost("no contribution to a part was left")
        mean = torch.div(total, self._weight, out=tools.buffers.scratch("values", self._part.num_values))
        if not tools.codec.encode(mean, payload, self._average):
            raise PartLost("a part reduced here is not finite")
        if not tools.codec.is_lossless:
            tools.feedback.end_sum(self._part, self._average, self._weight)


class Reducer:
    """Weighted means of some parts of the vector.

    Parts may come in any order from any sender. A part is done when everyone who is not banned has sent it. It is
    encoded once, and everybody, this peer included, uses exactly these bytes.

    Args:
        me: whose contribution is not sent but here already, if it has one.
        parts: what this peer reduces.
        senders: everyone who contributes, with the declared weight.
        contribution: this peer's own, or None.
        average: the whole vector; this peer's parts of it are filled in.
    """

    def __init__(
        self,
        me: str,
        parts: Sequence[Part],
        senders: Mapping[str, float],
        contribution: torch.Tensor | None,
        average: torch.Tensor,
        tools: Tools,
    ) -> None:
        self.parts = tuple(parts)
        self._senders, self._tools = dict(senders), tools
        own_weight = senders.get(me, 0.0)
        self._sums = [
            PartSum(
                part,
                None if contribution is None else contribution[part.start : part.stop],
                own_weight,
                average[part.start : part.stop],
            )
            for part in parts
        ]
        self._waiting = [set(senders) - {me} for _ in parts]
        self._results: list[asyncio.Future[bytearray]] = [asyncio.get_running_loop().create_future() for _ in parts]
        for result in self._results:
            result.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._is_closing = [False for _ in parts]
        self._tasks: set[asyncio.Task[None]] = set()
        # values so large that their weighted sum could overflow are as bad as values that already did
        self._largest = LARGEST_SUM / max(1.0, sum(senders.values()))
        self.banned: dict[str, str] = {}
        self.on_part_done: Callable[[], None] | None = None

    def start(self) -> None:
        """Parts that wait for nobody are done at once."""
        for index in range(len(self.parts)):
            self._close_if_complete(index)

    async def add(self, sender: str, index: int, payload: bytearray) -> None:
        """Take a part from another peer; raise Refused if it cannot be right."""
        if sender in self.banned or sender not in self._waiting[index]:
            return
        part_sum, weight = self._sums[index], self._senders[sender]
        try:
            if self._waiting[index] == {sender}:  # the last one: add and finish in one go, as waking a thread costs
                self._is_closing[index] = True
                await self._close(index, lambda: part_sum.add(payload, weight, self._largest, self._tools))
            else:
                await self._tools.run(part_sum.add, payload, weight, self._largest, self._tools)
        except Refused as error:
            self._is_closing[index] = False
            raise Refused(f"part {index} {error}") from None
        self._waiting[index].discard(sender)
        self._close_if_complete(index)

    def ban(self, sender: str, reason: str) -> None:
        """Go on without a sender: what it has not sent yet is no longer waited for."""
        if sender in self.banned or sender not in self._senders:
            return
        self.banned[sender] = reason
        for index, waiting in enumerate(self._waiting):
            if sender in waiting:
                waiting.discard(sender)
                self._close_if_complete(index)

    def _close_if_complete(self, index: int) -> None:
        if not self._waiting[index] and not self._is_closing[index]:
            self._is_closing[index] = True
            task = asyncio.get_running_loop().create_task(self._close(index))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _close(self, index: int, before: Callable[[], None] | None = None) -> None:
        result, part_sum = self._results[index], self._sums[index]
        payload = self._tools.buffers.payload(self._tools.codec.encoded_bytes(self.parts[index].num_values))

        def work() -> None:
            if before is not None:
                before()
            part_sum.finish(payload, self._tools)

        try:
            await self._tools.run(work)
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - somebody waits for this part, and must hear that it will not come
            lost = error if isinstance(error, PartLost) else PartLost(f"a part could not be reduced: {error!r}")
            if not result.done():
                result.set_exception(lost)
            return
        if not result.done():
            result.set_result(payload)
        if self.on_part_done is not None:
            self.on_part_done()

    async def result(self, index: int) -> bytearray:
        """The bytes everyone gets for a part; waits until the part is done."""
        return await asyncio.shield(self._results[index])

    def take_own(self) -> None:
        """From now on the contribution is not needed here any more."""
        for part_sum in self._sums:
            part_sum.begin(self._tools.feedback)

    def give_back(self) -> None:
        """Nobody fetches a part from us any more."""
        for result in self._results:
            if result.done() and not result.cancelled() and result.exception() is None:
                self._tools.buffers.give_back(result.result())
