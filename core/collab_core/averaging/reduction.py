"""One all-reduce in a closed group: send my contribution in parts, reduce my share, receive every average."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from hivemind.proto import averaging_pb2, runtime_pb2

from collab_core.averaging.codecs import Codec
from collab_core.averaging.faults import FailAt
from collab_core.averaging.feedback import Draft
from collab_core.averaging.group import Group, Part, check_weight
from collab_core.averaging.reducer import PartLost, Reducer, Refused

Message = Any  # averaging_pb2.AveragingData
Refusal = Callable[[str, str], None]

START_TIMEOUT_S = 8.0  # a sender that has not even opened its stream by then is gone


class RoundFailed(Exception):
    """Not every part of the average arrived. Nothing of the round is used."""


class Reduction:
    """One peer's side of one round. The contribution is only read; the average grows in a buffer of its own."""

    def __init__(
        self,
        *,
        me: str,
        group: Group,
        contribution: torch.Tensor | None,
        num_values: int,
        epoch: int,
        codec: Codec,
        feedback: Draft,
        weight_cap: float,
        timeout_s: float,
        stub_of: Callable[[str], Any],
        on_refused: Refusal,
        fail_at: FailAt | None,
    ) -> None:
        self.me, self.group = me, group
        self.average = torch.empty(num_values)
        self.bytes_sent = self.bytes_received = 0
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._mine = next(member for member in group.members if member.peer_id == me)
        self._contribution = contribution
        self._epoch, self._codec, self._feedback = epoch, codec, feedback
        self._weight_cap, self._timeout_s = weight_cap, timeout_s
        self._stub_of, self._on_refused, self._fail_at = stub_of, on_refused, fail_at
        self._plan = group.parts(num_values)
        self._reducer = Reducer(self._plan.get(me, []), group.senders, codec, feedback)
        self._reducer.on_part_done = self._after_a_part
        self._started: set[str] = {me}
        self._serving: set[str] = set()
        self._watch: asyncio.Task[None] | None = None

    # --- my own side ---

    async def run(self) -> torch.Tensor:
        """Everything this peer needs from the round; raises RoundFailed unless every part arrived."""
        self._watch = asyncio.create_task(self._ban_those_who_never_start())
        others = [peer_id for peer_id in self._plan if peer_id != self.me]
        tasks = [asyncio.create_task(self._reduce_mine())]
        if self._mine.weight > 0 or self._mine.wants_average:
            tasks += [asyncio.create_task(self._exchange_with(peer_id)) for peer_id in others]
        try:
            await asyncio.gather(*tasks)
        except PartLost as error:
            raise RoundFailed(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.average

    async def _reduce_mine(self) -> None:
        if self._contribution is not None and self._mine.weight > 0:
            for index, part in enumerate(self._reducer.parts):
                self._reducer.add(self.me, index, self._contribution[part.start : part.stop])
        for index, part in enumerate(self._reducer.parts):
            _, values = await self._reducer.result(index)
            if not bool(torch.isfinite(values).all()):
                raise RoundFailed("a part reduced here is not finite")
            self.average[part.start : part.stop] = values

    async def _exchange_with(self, peer_id: str) -> None:
        """Send a reducer its parts of my contribution, receive the averages of them."""
        parts = self._plan[peer_id]
        try:
            stream = await asyncio.wait_for(
                self._stub_of(peer_id).rpc_aggregate_part(self._outgoing(parts)), self._timeout_s
            )
            for index, part in enumerate(parts):
                # a reducer must itself wait for its slowest sender, so it gets twice the time
                message = await asyncio.wait_for(anext(stream), 2 * self._timeout_s)
                if message.code != averaging_pb2.AVERAGED_PART:
                    raise RoundFailed(f"the reducer {peer_id} ended the round with code {message.code}")
                payload = message.tensor_part.buffer
                if len(payload) != self._codec.encoded_bytes(part.num_values):
                    raise RoundFailed(f"part {index} from the reducer {peer_id} has the wrong size")
                self.bytes_received += len(payload)
                values = await asyncio.to_thread(self._codec.decode, payload)
                if not bool(torch.isfinite(values).all()):
                    raise RoundFailed(f"part {index} from the reducer {peer_id} is not finite")
                self.average[part.start : part.stop] = values
        except RoundFailed as error:
            self.lost[peer_id] = str(error)
            raise
        except Exception as e:
            reason = (
                "silent for too long"
                if isinstance(e, asyncio.TimeoutError)
                else f"the connection broke ({type(e).__name__})"
            )
            self.lost[peer_id] = reason
            raise RoundFailed(f"lost the reducer {peer_id}: {reason}") from e

    async def _outgoing(self, parts: list[Part]) -> AsyncIterator[Message]:
        weight = self._mine.weight
        yield averaging_pb2.AveragingData(
            code=averaging_pb2.PART_FOR_AVERAGING, group_id=self.group.group_id, weight=weight
        )
        if self._contribution is None or weight == 0:
            return
        for part in parts:
            payload = await asyncio.to_thread(self._encode, part, weight)
            self.bytes_sent += len(payload)
            yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=payload), weight=weight)

    def _encode(self, part: Part, weight: float) -> bytes:
        assert self._contribution is not None
        values = self._feedback.before_sending(self._contribution[part.start : part.stop], part, weight)
        payload = self._codec.encode(values)
        if not self._codec.is_lossless:
            self._feedback.sent(part, values - self._codec.decode(payload), weight)
        return payload

    # --- what others need from me ---

    def _after_a_part(self) -> None:
        if self._fail_at is not None:
            self._fail_at.reached("reduce", self._epoch)

    async def _ban_those_who_never_start(self) -> None:
        await asyncio.sleep(min(START_TIMEOUT_S, self._timeout_s))
        if not self._reducer.parts:
            return  # nobody has to send to us
        for sender in self.group.senders:
            if sender not in self._started:
                self._lose(sender, "never started to send")

    def _lose(self, sender: str, reason: str) -> None:
        if sender not in self._reducer.banned:
            self.lost.setdefault(sender, reason)
            self._reducer.ban(sender, reason)

    async def serve(self, stream: AsyncIterator[Message], sender: str) -> AsyncIterator[Message]:
        """Take one member's parts and answer with the averages as they are done."""
        if sender not in self.group.peer_ids or sender in self._started:
            self._on_refused(sender, "sent to a round twice, or without being in its group")
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._started.add(sender)
        self._serving.add(sender)
        receiving = asyncio.create_task(self._receive(stream, sender))
        try:
            for index in range(len(self._reducer.parts)):
                result = asyncio.create_task(self._reducer.result(index))
                await asyncio.wait({result, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done() and not receiving.result():
                    result.cancel()
                    yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
                    return
                payload, _ = await result
                self.bytes_sent += len(payload)
                yield averaging_pb2.AveragingData(
                    code=averaging_pb2.AVERAGED_PART, tensor_part=runtime_pb2.Tensor(buffer=payload)
                )
            if not await receiving:  # everything was averaged, then it sent more: it gets no good end either
                yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
        except PartLost:
            yield averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)
        finally:
            if not receiving.done():
                receiving.cancel()
                self._lose(sender, "left in the middle of the round")
            self._serving.discard(sender)

    async def _receive(self, stream: AsyncIterator[Message], sender: str) -> bool:
        """Take all parts of one sender. False if it was refused."""
        declared = self.group.senders.get(sender, 0.0)
        index, num_parts = 0, len(self._reducer.parts)
        try:
            while True:
                try:
                    message = await asyncio.wait_for(anext(stream), self._timeout_s)
                except StopAsyncIteration:
                    break
                if declared == 0:
                    raise Refused("sent values after declaring none")
                if index == num_parts:
                    raise Refused(f"sent more than its {num_parts} parts")
                if reason := check_weight(message.weight, self._weight_cap):
                    raise Refused(reason)
                if message.weight != declared:
                    raise Refused(f"declared a weight of {declared:g}, then sent {message.weight:g}")
                payload = message.tensor_part.buffer
                self.bytes_received += len(payload)
                await self._reducer.add_encoded(sender, index, payload)
                index += 1
            if declared > 0 and index != num_parts:
                raise Refused(f"sent {index} of its {num_parts} parts")
        except Refused as error:
            self.refused[sender] = str(error)
            self._reducer.ban(sender, str(error))
            self._on_refused(sender, str(error))
            return False
        except asyncio.TimeoutError:
            self._lose(sender, "silent for too long")
        return True

    async def drain(self) -> None:
        """Stay for those who still fetch their averages from me, for a bounded time."""
        self._contribution = None
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        expected = {m.peer_id for m in self.group.members if m.weight > 0 or m.wants_average} - {self.me}
        while self._reducer.parts and asyncio.get_running_loop().time() < deadline:
            gone = set(self._reducer.banned) | self._started
            if not self._serving and expected <= gone:
                break
            await asyncio.sleep(0.05)
        if self._watch is not None:
            self._watch.cancel()
