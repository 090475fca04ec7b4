"""One all-reduce in a closed group: send my contribution in parts, reduce my share, receive every average."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty

import torch

from collab_core.averaging.codecs import is_finite
from collab_core.averaging.faults import FailAt
from collab_core.averaging.group import Group, Part, check_weight
from collab_core.averaging.part_sum import PartLost, Refused, Tools
from collab_core.averaging.reducer import Queue, Reducer
from collab_core.averaging.wire import BadFrame, Frame, Kind, PartLine, PartStream

logger = logging.getLogger(__name__)

Refusal = Callable[[str, str, bool], None]
"""Who is refused, why, and whether that was a lie: something that no honest peer does, whatever others do to it."""

SERVED_POLL_S = 0.05
GONE_POLL_S = 0.25
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
        tools: Tools,
        weight_cap: float,
        timeout_s: float,
        patience_s: float,
        connect: Callable[[str], Awaitable[PartStream]],
        is_gone: Callable[[str], bool],
        on_refused: Refusal,
        fail_at: FailAt | None,
    ) -> None:
        self.me, self.group = me, group
        self.average = tools.buffers.vector(num_values)
        self._bytes_sent: list[int] = []
        """Of every part; threads count here."""
        self._bytes_received: list[int] = []
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._mine = next(member for member in group.members if member.peer_id == me)
        self._contribution = contribution if self._mine.weight > 0 else None
        self._epoch, self._tools, self._codec = epoch, tools, tools.codec
        self._weight_cap, self._timeout_s, self._patience_s = weight_cap, timeout_s, patience_s
        self._connect, self._is_gone = connect, is_gone
        self._on_refused, self._fail_at = on_refused, fail_at
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

    @property
    def bytes_sent(self) -> int:
        return sum(self._bytes_sent)

    @property
    def bytes_received(self) -> int:
        return sum(self._bytes_received)

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
        await asyncio.shield(asyncio.wrap_future(self._reducer.done))

    async def _exchange_with(self, peer_id: str) -> None:
        """Send a reducer its parts of my contribution, receive the averages of them."""
        stream: PartStream | None = None
        sending: asyncio.Task[None] | None = None
        try:
            stream = await asyncio.wait_for(self._connect(peer_id), self._timeout_s)
            sending = asyncio.create_task(stream.in_thread(partial(self._send_parts, parts=self._plan[peer_id])))
            await stream.in_thread(partial(self._take_averages, peer_id=peer_id))
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
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    # in threads, one for each stream and direction

    def _take_averages(self, line: PartLine, peer_id: str) -> None:
        decoding: Future[None] | None = None
        for index, part in enumerate(self._plan[peer_id]):
            payload = self._receive_average(line, peer_id, index, part)
            if decoding is not None:
                decoding.result()
            decoding = self._tools.thread.submit(self._decode, peer_id, index, part, payload)
        if decoding is not None:
            decoding.result()

    def _receive_average(self, line: PartLine, peer_id: str, index: int, part: Part) -> bytearray:
        # a reducer must itself wait for its slowest sender, so it gets twice the time
        num_bytes = self._tools.codec.for_averages.encoded_bytes(part.num_values)
        try:
            frame = line.receive(num_bytes, 2 * self._timeout_s)
        except BadFrame as error:
            raise RoundFailed(f"part {index} from the reducer {peer_id} is wrong: {error}") from None
        if frame is None:
            raise ConnectionError
        if frame.kind is not Kind.AVERAGE or len(frame.payload) != num_bytes:
            raise RoundFailed(f"the reducer {peer_id} ended the round ({frame.kind.name})")
        self._bytes_received.append(num_bytes)
        self._num_fetched[peer_id] += 1
        return frame.payload

    def _send_parts(self, line: PartLine, parts: list[Part]) -> None:
        line.send(Frame(Kind.HELLO, self._mine.weight, bytearray(self.group.group_id)))
        for frame in self._outgoing(parts):
            line.send(frame)
            self._bytes_sent.append(len(frame.payload))
            self._tools.buffers.give_back(frame.payload)
        line.send(Frame(Kind.END))

    def _outgoing(self, parts: list[Part]) -> Iterator[Frame]:
        """My parts, encoded one ahead of the network."""
        contribution, weight = self._contribution, self._mine.weight
        if contribution is None:
            return
        ahead = self._tools.thread.submit(self._encode, contribution, parts[0])
        for following in (*parts[1:], None):
            payload = ahead.result()
            if following is not None:
                ahead = self._tools.thread.submit(self._encode, contribution, following)
            yield Frame(Kind.PART, weight, payload)

    # in the thread for arithmetic

    def _decode(self, peer_id: str, index: int, part: Part, payload: bytearray) -> None:
        mine = self.average[part.start : part.stop]
        self._tools.codec.for_averages.decode(payload, mine)
        if not is_finite(mine):
            raise RoundFailed(f"part {index} from the reducer {peer_id} is not finite")
        self._tools.buffers.give_back(payload)

    def _encode(self, contribution: torch.Tensor, part: Part) -> bytearray:
        weight, tools = self._mine.weight, self._tools
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
        for _ in range(math.ceil(start_s / GONE_POLL_S)):
            await asyncio.sleep(min(GONE_POLL_S, start_s))
            for sender in filter(self._is_gone, self.group.senders.keys() - self._started):
                self._lose(sender, "left before it sent anything")
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
            try:
                await asyncio.wait_for(stream.send(Frame(kind)), self._timeout_s)
            except TimeoutError:
                return  # it does not even read that
        await stream.finish(self._timeout_s)

    async def _answer(self, stream: PartStream, sender: str) -> Kind:
        """Take a sender's parts, send the averages; returns how it ended."""
        done = self._reducer.listen()
        receiving = asyncio.create_task(self._receive(stream, sender))
        giving = asyncio.create_task(stream.in_thread(partial(self._give_averages, done=done)))
        giving.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may end after us
        try:
            await asyncio.wait({receiving, giving}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and not receiving.result():
                done.put(None)
                await asyncio.gather(giving, return_exceptions=True)  # a frame is not cut off in its middle
                return Kind.REFUSED
            await giving
            # if everything was averaged and then it sent more, it gets no good end either
            return Kind.END if await receiving else Kind.REFUSED
        except PartLost:
            return Kind.LOST
        except TimeoutError:  # whoever does not read what it asked for is not waited for
            raise ConnectionResetError from None
        finally:
            done.put(None)
            giving.cancel()
            if not receiving.done():
                receiving.cancel()
                self._lose(sender, "left in the middle of the round")

    async def _receive(self, stream: PartStream, sender: str) -> bool:
        """Take all parts of one sender. False if it was refused."""
        num_parts = len(self._reducer.parts) if self.group.senders.get(sender, 0.0) > 0 else 0
        try:
            if num_parts and not await stream.in_thread(partial(self._take_parts, sender=sender)):
                self._lose(sender, "left in the middle of the round")
                return True
            self._received.add(sender)
            last = await asyncio.wait_for(stream.receive(0), self._timeout_s)
            if last is not None and last.kind is not Kind.END:
                raise Refused(f"sent more than its {num_parts} parts")
        except BadFrame as error:  # only of the last frame: nothing was to come any more
            return self._refuse(sender, f"sent more than its {num_parts} parts ({error})")
        except Refused as error:
            return self._refuse(sender, str(error), is_lie=error.is_lie)
        except TimeoutError:
            self._lose(sender, "silent for too long")
        except Exception as error:  # whatever it is, the others should not wait for this sender
            logger.exception("could not take the parts of %s", sender)
            self._lose(sender, f"its part could not be taken ({type(error).__name__})")
        return True

    # in threads, one for each stream and direction

    def _take_parts(self, line: PartLine, sender: str) -> bool:
        """Whether all of them came; raises Refused if one is wrong."""
        declared = self.group.senders[sender]
        adding: Future[None] | None = None
        for index, part in enumerate(self._reducer.parts):
            num_bytes = self._codec.encoded_bytes(part.num_values)
            frame = self._next_part(line, index, num_bytes)
            if frame is None:
                return False
            if reason := check_weight(frame.weight, self._weight_cap):
                raise Refused(reason)
            if frame.weight != declared:
                raise Refused(f"declared a weight of {declared:g}, then sent {frame.weight:g}")
            self._bytes_received.append(num_bytes)
            if adding is not None:
                adding.result()
            adding = self._reducer.add(sender, index, frame.payload)
        if adding is not None:
            adding.result()
        return True

    def _next_part(self, line: PartLine, index: int, num_bytes: int) -> Frame | None:
        try:
            frame = line.receive(num_bytes, self._timeout_s)
        except BadFrame as error:
            raise Refused(f"part {index} has {error}") from None
        if frame is not None and (frame.kind is not Kind.PART or len(frame.payload) != num_bytes):
            raise Refused(f"part {index} did not come, but {frame.kind.name} with {len(frame.payload)} bytes")
        return frame

    def _give_averages(self, line: PartLine, done: Queue) -> None:
        """In their order, as they are done; until they are all given, or nobody wants them any more."""
        is_done: set[int] = set()
        for index in range(len(self._reducer.parts)):
            while index not in is_done:
                try:
                    number = done.get(timeout=self._patience_s + self._timeout_s)
                except Empty:
                    raise PartLost("a part was not done in time") from None
                if number is None:
                    return
                is_done.add(number)
            self._give(line, self._reducer.result(index))

    def _give(self, line: PartLine, payload: bytearray) -> None:
        line.send(Frame(Kind.AVERAGE, payload=payload), 2 * self._timeout_s)
        self._bytes_sent.append(len(payload))

    # in the event loop

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
