"""One all-reduce in a closed group: send my contribution in parts, reduce my share, receive every average."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import torch

from collab_core.averaging.codecs import is_finite
from collab_core.averaging.faults import FailAt
from collab_core.averaging.group import Group, Part, check_weight
from collab_core.averaging.part_sum import PartLost, Refused, Tools
from collab_core.averaging.reducer import Reducer
from collab_core.averaging.wire import BadFrame, Frame, Kind, PartStream

logger = logging.getLogger(__name__)

Refusal = Callable[[str, str, bool], None]
"""Who is refused, why, and whether that was a lie: something that no honest peer does, whatever others do to it."""

SERVED_POLL_S = 0.05
START_TIMEOUT_S = 8.0  # a sender that has not even opened its stream by then is gone


class OneBehind:
    """Works on one part while the next one arrives."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def then(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin this work once the last one is done; raises what the last one raised."""
        try:
            await self.done()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(work)

    async def done(self) -> None:
        """Wait for the last work."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


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
        tools: Tools,
        weight_cap: float,
        timeout_s: float,
        patience_s: float,
        connect: Callable[[str], Awaitable[PartStream]],
        on_refused: Refusal,
        fail_at: FailAt | None,
    ) -> None:
        self.me, self.group = me, group
        self.average = tools.buffers.vector(num_values)
        self.bytes_sent = self.bytes_received = 0
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._mine = next(member for member in group.members if member.peer_id == me)
        self._contribution = contribution if self._mine.weight > 0 else None
        self._epoch, self._tools, self._codec = epoch, tools, tools.codec
        self._weight_cap, self._timeout_s, self._patience_s = weight_cap, timeout_s, patience_s
        self._connect, self._on_refused, self._fail_at = connect, on_refused, fail_at
        self._plan = group.parts(num_values)
        self._reducer = Reducer(
            me, self._plan.get(me, []), group.senders, self._contribution, self.average, tools, group.norms
        )
        self.share = sum(part.num_values for part in self._reducer.parts) / num_values
        self._reducer.on_part_done = self._after_a_part
        self._started: set[str] = {me}
        self._received: set[str] = {me}
        """Senders of whom we have everything."""
        self._serving: dict[str, PartStream] = {}
        self._num_fetched: dict[str, int] = {}
        """Parts of the average that we have, by who reduced them for us."""
        self._is_over = False
        self._watch: asyncio.Task[None] | None = None

    # --- my own side ---

    async def run(self) -> torch.Tensor:
        """Everything this peer needs from the round; raises RoundFailed unless every part arrived."""
        self._watch = asyncio.create_task(self._ban_the_slow())
        others = [peer_id for peer_id in self._plan if peer_id != self.me]
        tasks = [asyncio.create_task(self._reduce_mine())]
        if self._mine.weight > 0 or self._mine.wants_average:
            self._num_fetched = dict.fromkeys(others, 0)
            tasks += [asyncio.create_task(self._exchange_with(peer_id)) for peer_id in others]
        try:
            await asyncio.gather(*tasks)
        except PartLost as error:
            raise RoundFailed(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._tools.run(self._reducer.take_own)  # if we failed, others may still need our part
        return self.average

    def blame_the_slowest(self) -> str | None:
        """The time is up: of the reducers that still owe us something, the one that gave least is lost.

        Only that one. If it is our own link that is slow, all of them owe us something.
        """
        shares = {peer_id: count / len(self._plan[peer_id]) for peer_id, count in self._num_fetched.items()}
        slowest = min(shares, key=shares.__getitem__, default=None)
        if slowest is None or shares[slowest] == 1:
            return None
        self.lost[slowest] = "too slow"
        return slowest

    async def _reduce_mine(self) -> None:
        self._reducer.start()
        for index in range(len(self._reducer.parts)):
            await self._reducer.result(index)

    async def _exchange_with(self, peer_id: str) -> None:
        """Send a reducer its parts of my contribution, receive the averages of them."""
        stream: PartStream | None = None
        sending: asyncio.Task[None] | None = None
        decoding = OneBehind()
        try:
            stream = await asyncio.wait_for(self._connect(peer_id), self._timeout_s)
            sending = asyncio.create_task(self._send_parts(stream, self._plan[peer_id]))
            for index, part in enumerate(self._plan[peer_id]):
                payload = await self._receive_average(stream, peer_id, index, part)
                await decoding.then(self._decode(peer_id, index, part, payload))
            await decoding.done()
            await sending
        except RoundFailed as error:
            self.lost[peer_id] = str(error)
            raise
        except Exception as e:
            is_silent = isinstance(e, asyncio.TimeoutError)
            reason = "silent for too long" if is_silent else f"the connection broke ({type(e).__name__})"
            self.lost[peer_id] = reason
            raise RoundFailed(f"lost the reducer {peer_id}: {reason}") from e
        finally:
            if stream is not None:
                stream.close()  # first: whoever is cancelled twice gets no further than to its next wait
            await decoding.cancel()
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _receive_average(self, stream: PartStream, peer_id: str, index: int, part: Part) -> bytearray:
        # a reducer must itself wait for its slowest sender, so it gets twice the time
        num_bytes = self._tools.codec.for_averages.encoded_bytes(part.num_values)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                frame = await stream.receive(num_bytes)
        except BadFrame as error:
            raise RoundFailed(f"part {index} from the reducer {peer_id} is wrong: {error}") from None
        if frame is None:
            raise ConnectionError
        if frame.kind is not Kind.AVERAGE or len(frame.payload) != num_bytes:
            raise RoundFailed(f"the reducer {peer_id} ended the round ({frame.kind.name})")
        self.bytes_received += num_bytes
        self._num_fetched[peer_id] += 1
        return frame.payload

    async def _decode(self, peer_id: str, index: int, part: Part, payload: bytearray) -> None:
        mine = self.average[part.start : part.stop]

        def decode() -> bool:
            self._tools.codec.for_averages.decode(payload, mine)
            return is_finite(mine)

        if not await self._tools.run(decode):
            raise RoundFailed(f"part {index} from the reducer {peer_id} is not finite")
        self._tools.buffers.give_back(payload)

    async def _send_parts(self, stream: PartStream, parts: list[Part]) -> None:
        await stream.send(Frame(Kind.HELLO, self._mine.weight, bytearray(self.group.group_id)))
        async for frame in self._outgoing(parts):
            await stream.send(frame)
            self.bytes_sent += len(frame.payload)
            self._tools.buffers.give_back(frame.payload)
        await stream.send(Frame(Kind.END))

    async def _outgoing(self, parts: list[Part]) -> AsyncIterator[Frame]:
        """My parts, encoded one ahead of the network."""
        if self._contribution is None:
            return
        ahead: asyncio.Task[bytearray] | None = None
        try:
            for index, part in enumerate(parts):
                payload = await (ahead or self._tools.run(self._encode, part))
                ahead = None
                if index + 1 < len(parts):
                    ahead = asyncio.create_task(self._tools.run(self._encode, parts[index + 1]))
                yield Frame(Kind.PART, self._mine.weight, payload)
        finally:
            if ahead is not None:
                ahead.cancel()

    def _encode(self, part: Part) -> bytearray:
        contribution, weight, tools = self._contribution, self._mine.weight, self._tools
        assert contribution is not None
        payload = tools.buffers.payload(tools.codec.encoded_bytes(part.num_values))
        scratch = tools.buffers.scratch("values", part.num_values)
        decoded = tools.buffers.scratch("decoded", part.num_values)
        values = tools.feedback.with_residue(contribution[part.start : part.stop], part, weight, out=scratch)
        tools.codec.encode(values, payload, decoded)
        if not tools.codec.is_lossless:
            tools.feedback.note(part, values, decoded, weight)
        return payload

    # --- what others need from me ---

    def _after_a_part(self) -> None:
        if self._fail_at is not None:
            self._fail_at.reached("reduce", self._epoch)

    async def _ban_the_slow(self) -> None:
        """Who never starts is gone; who sends a little now and then must not hold up everybody's round."""
        if not self._reducer.parts:
            return  # nobody has to send to us
        start_s = min(START_TIMEOUT_S, self._timeout_s)
        await asyncio.sleep(start_s)
        for sender in self.group.senders.keys() - self._started:
            self._lose(sender, "never started to send")
        await asyncio.sleep(self._patience_s - start_s)
        for sender in self.group.senders.keys() - self._received:
            self._lose(sender, "too slow")

    def _lose(self, sender: str, reason: str) -> None:
        if sender not in self._reducer.banned:
            self.lost.setdefault(sender, reason)
            self._reducer.ban(sender, reason)

    async def serve(self, stream: PartStream, sender: str) -> None:
        """Take one member's parts and answer with the averages as they are done."""
        if self._is_over:
            await self._end(stream, Kind.NO_GROUP)
            return
        if sender not in self.group.peer_ids or sender in self._started:
            # not a lie: a leader that begins a group twice makes its members do this
            self._on_refused(sender, "sent to a round twice, or without being in its group", False)
            await self._end(stream, Kind.REFUSED)
            return
        self._started.add(sender)
        self._serving[sender] = stream
        try:
            await self._end(stream, await self._answer(stream, sender))
        finally:
            del self._serving[sender]

    async def _end(self, stream: PartStream, kind: Kind) -> None:
        if kind is not Kind.END:  # whoever got all averages knows that this is the end
            await self._send(stream, Frame(kind))
        await stream.finish(self._timeout_s)

    async def _send(self, stream: PartStream, frame: Frame) -> None:
        """Whoever does not read what it asked for is not waited for."""
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await stream.send(frame)
        except TimeoutError:
            stream.close()
            raise ConnectionResetError from None

    async def _answer(self, stream: PartStream, sender: str) -> Kind:
        """Send the averages; returns how it ended."""
        receiving = asyncio.create_task(self._receive(stream, sender))
        try:
            for index in range(len(self._reducer.parts)):
                result = asyncio.create_task(self._reducer.result(index))
                await asyncio.wait({result, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done() and not receiving.result():
                    result.cancel()
                    return Kind.REFUSED
                payload = await result
                await self._send(stream, Frame(Kind.AVERAGE, payload=payload))
                self.bytes_sent += len(payload)
            # if everything was averaged and then it sent more, it gets no good end either
            return Kind.END if await receiving else Kind.REFUSED
        except PartLost:
            return Kind.LOST
        finally:
            if not receiving.done():
                receiving.cancel()
                self._lose(sender, "left in the middle of the round")

    async def _receive(self, stream: PartStream, sender: str) -> bool:
        """Take all parts of one sender. False if it was refused."""
        declared = self.group.senders.get(sender, 0.0)
        parts = self._reducer.parts if declared > 0 else ()
        adding = OneBehind()
        try:
            for index, part in enumerate(parts):
                num_bytes = self._codec.encoded_bytes(part.num_values)
                frame = await self._next_part(stream, index, num_bytes)
                if frame is None:
                    self._lose(sender, "left in the middle of the round")
                    return True
                if reason := check_weight(frame.weight, self._weight_cap):
                    raise Refused(reason)
                if frame.weight != declared:
                    raise Refused(f"declared a weight of {declared:g}, then sent {frame.weight:g}")
                self.bytes_received += num_bytes
                await adding.then(self._reducer.add(sender, index, frame.payload))
            await adding.done()
            self._received.add(sender)
            last = await asyncio.wait_for(stream.receive(0), self._timeout_s)
            if last is not None and last.kind is not Kind.END:
                raise Refused(f"sent more than its {len(parts)} parts")
        except BadFrame as error:  # only of the last frame: nothing was to come any more
            return self._refuse(sender, f"sent more than its {len(parts)} parts ({error})")
        except Refused as error:
            return self._refuse(sender, str(error), is_lie=error.is_lie)
        except TimeoutError:
            self._lose(sender, "silent for too long")
        except Exception as error:  # whatever it is, the others should not wait for this sender
            logger.exception("could not take the parts of %s", sender)
            self._lose(sender, f"its part could not be taken ({type(error).__name__})")
        finally:
            await adding.cancel()
        return True

    async def _next_part(self, stream: PartStream, index: int, num_bytes: int) -> Frame | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                frame = await stream.receive(num_bytes)
        except BadFrame as error:
            raise Refused(f"part {index} has {error}") from None
        if frame is not None and (frame.kind is not Kind.PART or len(frame.payload) != num_bytes):
            raise Refused(f"part {index} did not come, but {frame.kind.name} with {len(frame.payload)} bytes")
        return frame

    def _refuse(self, sender: str, reason: str, *, is_lie: bool = True) -> bool:
        self.refused[sender] = reason
        self._reducer.ban(sender, reason)
        self._on_refused(sender, reason, is_lie)
        return False

    async def served(self, timeout_s: float) -> None:
        """Until nobody needs anything from me any more, or the time is up."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        expected = {m.peer_id for m in self.group.members if m.weight > 0 or m.wants_average} - {self.me}
        while self._reducer.parts and asyncio.get_running_loop().time() < deadline:
            if not self._serving and expected <= set(self._reducer.banned) | self._started:
                return
            await asyncio.sleep(SERVED_POLL_S)

    async def drain(self) -> None:
        """Stay for those who still fetch their averages from me, for a bounded time."""
        self._contribution = None
        await self.served(self._timeout_s)
        if self._watch is not None:
            self._watch.cancel()
        self._is_over = True
        if not self._serving:
            self._reducer.give_back()
            return
        await self.served(self._patience_s)  # nobody is without its averages for longer than a round
        for stream in self._serving.values():
            stream.close()
