"""What a peer does for the others in a round: average its parts over everyone who sends, refuse what is wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch

from collab_core.averaging.group import Part
from collab_core.averaging.norms import clip_factors, largest_squared_norm
from collab_core.averaging.part_stack import PartStack
from collab_core.averaging.part_sum import PartLost, PartSum, Refused, Sender, Tools

logger = logging.getLogger(__name__)

LARGEST_SUM = 1e37


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
        norms: what the senders declared; None holds nobody to anything.
    """

    def __init__(
        self,
        me: str,
        parts: Sequence[Part],
        senders: Mapping[str, float],
        contribution: torch.Tensor | None,
        average: torch.Tensor,
        tools: Tools,
        norms: Mapping[str, float] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._tools = tools
        self._senders = self._declared(senders, norms)
        mine = self._senders.get(me, Sender(0.0))
        kind = PartSum if tools.reduce is None else PartStack
        self._sums = [
            kind(
                part,
                None if contribution is None else contribution[part.start : part.stop],
                mine,
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

    def _declared(self, weights: Mapping[str, float], norms: Mapping[str, float] | None) -> dict[str, Sender]:
        if norms is None:
            return {sender: Sender(weight) for sender, weight in weights.items()}
        num_values, codec = sum(part.num_values for part in self.parts), self._tools.codec
        factors = clip_factors(weights, norms, adds_up=self._tools.adds_up)
        return {
            sender: Sender(
                weight, norms[sender], factors[sender], largest_squared_norm(norms[sender], num_values, codec)
            )
            for sender, weight in weights.items()
        }

    def start(self) -> None:
        """Parts that wait for nobody are done at once."""
        for index in range(len(self.parts)):
            self._close_if_complete(index)

    async def add(self, sender: str, index: int, payload: bytearray) -> None:
        """Take a part from another peer; raise Refused if it cannot be right. The payload is ours from now on.

        What has begun goes on if the caller is cancelled because the sender left: others wait for the part.
        """
        if sender not in self.banned and sender in self._waiting[index]:
            await asyncio.shield(self._begin(self._take(sender, index, payload)))

    async def _take(self, sender: str, index: int, payload: bytearray) -> None:
        part_sum, declared = self._sums[index], self._senders[sender]
        is_last = self._waiting[index] == {sender}

        def add() -> None:
            try:
                part_sum.add(payload, declared, self._largest, self._tools)
            except Refused:
                raise
            except Exception as error:  # the part must not be lost for everyone because of one sender
                logger.exception("could not add a part of %s", sender)
                raise Refused(f"could not be added ({type(error).__name__})", is_lie=False) from error

        try:
            if is_last:  # add and finish in one go, as waking a thread costs
                self._is_closing[index] = True
                await self._close(index, add)
            else:
                await self._tools.run(add)
        except Refused as error:
            if is_last:
                self._is_closing[index] = False
                self._close_if_complete(index)  # it was banned meanwhile
            raise Refused(f"part {index} {error}", is_lie=error.is_lie) from None
        self._waiting[index].discard(sender)
        self._close_if_complete(index)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe nobody waits for it any more
        return task

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
            self._begin(self._close(index))

    async def _close(self, index: int, before: Callable[[], None] | None = None) -> None:
        result, part_sum = self._results[index], self._sums[index]
        num_bytes = self._tools.codec.for_averages.encoded_bytes(self.parts[index].num_values)
        payload = self._tools.buffers.payload(num_bytes)

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
