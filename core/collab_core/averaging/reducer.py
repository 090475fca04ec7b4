"""What a peer does for the others in a round: average its parts over everyone who sends, refuse what is wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from collab_core.averaging.codecs import Codec
from collab_core.averaging.feedback import Draft
from collab_core.averaging.group import Part

LARGEST_SUM = 1e37


class Refused(Exception):
    """A sender broke the rules: its part enters no average, and it is banned for the round."""


class PartLost(Exception):
    """Nobody's contribution to a part is left, so there is no average of it."""


class Reducer:
    """Weighted means of some parts of the vector.

    Parts may come in any order from any sender. A part is done when everyone who is not banned has sent it. It is
    encoded once, and everybody, this peer included, uses exactly these bytes.
    """

    def __init__(self, parts: Sequence[Part], senders: Mapping[str, float], codec: Codec, feedback: Draft) -> None:
        self.parts = tuple(parts)
        self._senders = dict(senders)
        self._codec = codec
        self._feedback = feedback
        self._waiting = [set(senders) for _ in parts]
        self._sums = [torch.zeros(part.num_values) for part in parts]
        self._weights = [0.0 for _ in parts]
        self._results: list[asyncio.Future[tuple[bytes, torch.Tensor]]] = [
            asyncio.get_running_loop().create_future() for _ in parts
        ]
        for result in self._results:
            result.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._closing: dict[int, asyncio.Task[None] | None] = {}
        # values so large that their weighted sum could overflow are as bad as values that already did
        self._largest = LARGEST_SUM / max(1.0, sum(senders.values()))
        self.banned: dict[str, str] = {}
        self.on_part_done: Callable[[], None] | None = None

    async def add_encoded(self, sender: str, index: int, payload: bytes) -> None:
        """Take a part from another peer; raise Refused if it cannot be right."""
        part = self.parts[index]
        expected = self._codec.encoded_bytes(part.num_values)
        if len(payload) != expected:
            raise Refused(f"part {index} has {len(payload)} bytes instead of {expected}")
        values = await asyncio.to_thread(self._codec.decode, payload)
        largest = float(values.abs().max()) if len(values) else 0.0
        if not math.isfinite(largest):
            raise Refused(f"part {index} has values that are not finite")
        if largest > self._largest:
            raise Refused(f"part {index} has values as large as {largest:.3g}")
        self.add(sender, index, values)

    def add(self, sender: str, index: int, values: torch.Tensor) -> None:
        """Take a part that is known to be good."""
        if sender in self.banned or sender not in self._waiting[index]:
            return
        weight = self._senders[sender]
        self._sums[index] += values * weight
        self._weights[index] += weight
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
        if self._waiting[index] or index in self._closing:
            return
        self._closing[index] = None
        if self._weights[index] == 0:
            self._results[index].set_exception(PartLost("no contribution to a part was left"))
            return
        self._closing[index] = asyncio.get_running_loop().create_task(self._close(index))

    async def _close(self, index: int) -> None:
        try:
            await self._publish(index)
        except Exception as error:  # noqa: BLE001 - somebody waits for this part, and must hear that it will not come
            if not self._results[index].done():
                self._results[index].set_exception(PartLost(f"a part could not be reduced: {error!r}"))

    async def _publish(self, index: int) -> None:
        part = self.parts[index]

        def encode() -> tuple[bytes, torch.Tensor, torch.Tensor]:
            average = self._feedback.before_publishing(self._sums[index] / self._weights[index], part)
            payload = self._codec.encode(average)
            decoded = self._codec.decode(payload)
            return payload, decoded, average - decoded

        payload, decoded, lost = await asyncio.to_thread(encode)
        if not self._codec.is_lossless:
            self._feedback.reduced(part, lost)
        if not self._results[index].done():
            self._results[index].set_result((payload, decoded))
        if self.on_part_done is not None:
            self.on_part_done()

    async def result(self, index: int) -> tuple[bytes, torch.Tensor]:
        """The bytes everyone gets for a part, and what they decode to; waits until the part is done."""
        return await asyncio.shield(self._results[index])
