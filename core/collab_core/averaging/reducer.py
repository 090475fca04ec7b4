"""What a peer does for the others in a round: average its parts over everyone who sends, refuse what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from collab_core.averaging.group import Part
from collab_core.averaging.norms import clip_factors, largest_squared_norm
from collab_core.averaging.part_stack import PartStack
from collab_core.averaging.part_sum import PartLost, PartSum, Refused, Sender, Tools

logger = logging.getLogger(__name__)

LARGEST_SUM = 1e37

Queue = SimpleQueue[int | None]
"""Numbers of parts; None from whoever does not want to know any more."""


class Reducer:
    """Weighted means of some parts of the vector.

    Parts may come in any order from any sender. A part is done when everyone who is not banned has sent it. It is
    encoded once, and everybody, this peer included, uses exactly these bytes.

    All of it happens in the thread for arithmetic; what others may call says so.

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
        self._results: list[bytearray | PartLost | None] = [None for _ in parts]
        self._queues: list[Queue] = []
        # values so large that their weighted sum could overflow are as bad as values that already did
        self._largest = LARGEST_SUM / max(1.0, sum(senders.values()))
        self.done: Future[None] = Future()
        """Of every part; the first that is lost ends it with PartLost."""
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

    # --- for every thread ---

    def start(self) -> None:
        """Parts that wait for nobody are done at once."""
        self._tools.thread.submit(self._look_at_all)

    def add(self, sender: str, index: int, payload: bytearray) -> Future[None]:
        """Take a part from another peer, whose payload is ours from now on; the future has Refused if it is wrong."""
        return self._tools.thread.submit(self._add, sender, index, payload)

    def ban(self, sender: str, reason: str) -> None:
        """Go on without a sender: what it has not sent yet is no longer waited for."""
        if sender in self._senders and sender not in self.banned:
            self.banned[sender] = reason
            self._tools.thread.submit(self._do_without, sender)

    def listen(self) -> Queue:
        """Where the numbers of all parts appear as they are done, also of those that are done already."""
        queue: Queue = SimpleQueue()
        self._tools.thread.submit(self._tell, queue)
        return queue

    def result(self, index: int) -> bytearray:
        """The bytes everyone gets for a part that is done; raises PartLost if there are none."""
        result = self._results[index]
        assert result is not None, "it is done when a queue says so"
        if isinstance(result, PartLost):
            raise result
        return result

    def give_back(self) -> None:
        """Nobody fetches a part from us any more."""
        for result in self._results:
            if isinstance(result, bytearray):
                self._tools.buffers.give_back(result)

    # --- in the thread for arithmetic ---

    def _add(self, sender: str, index: int, payload: bytearray) -> None:
        if sender in self.banned or sender not in self._waiting[index]:
            return
        try:
            self._sums[index].add(payload, self._senders[sender], self._largest, self._tools)
        except Refused as error:
            raise Refused(f"part {index} {error}", is_lie=error.is_lie) from None
        except Exception as error:  # the part must not be lost for everyone because of one sender
            logger.exception("could not add a part of %s", sender)
            raise Refused(f"part {index} could not be added ({type(error).__name__})", is_lie=False) from error
        self._waiting[index].discard(sender)
        self._close_if_complete(index)

    def _do_without(self, sender: str) -> None:
        for waiting in self._waiting:
            waiting.discard(sender)
        self._look_at_all()

    def _look_at_all(self) -> None:
        for index in range(len(self.parts)):
            self._close_if_complete(index)
        if not self.parts and not self.done.done():
            self.done.set_result(None)

    def _close_if_complete(self, index: int) -> None:
        if self._waiting[index] or self._results[index] is not None:
            return
        result = self._finish(index)
        if self.on_part_done is not None:
            self.on_part_done()  # who dies here takes what nobody has seen along
        self._results[index] = result
        for queue in self._queues:
            queue.put(index)
        if self.done.done():
            pass  # a part was lost before
        elif isinstance(result, PartLost):
            self.done.set_exception(result)
        elif all(result is not None for result in self._results):
            self.done.set_result(None)

    def _finish(self, index: int) -> bytearray | PartLost:
        payload = self._tools.buffers.payload(
            self._tools.codec.for_averages.encoded_bytes(self.parts[index].num_values)
        )
        try:
            self._sums[index].finish(payload, self._tools)
        except PartLost as lost:
            return lost
        except Exception as error:  # noqa: BLE001 - somebody waits for this part, and must hear that it will not come
            return PartLost(f"a part could not be reduced: {error!r}")
        return payload

    def _tell(self, queue: Queue) -> None:
        for index, result in enumerate(self._results):
            if result is not None:
                queue.put(index)
        self._queues.append(queue)

    def take_own(self) -> None:
        """From now on the contribution is not needed here any more."""
        for part_sum in self._sums:
            part_sum.begin(self._tools.feedback)
