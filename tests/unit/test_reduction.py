"""One round, from inside: whatever a sender's stream does, nobody waits for its part for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import GROUP_ID_BYTES, MIN_PART_VALUES, MIN_PARTS, Member, name_group
from collab_core.averaging.link import Link
from collab_core.averaging.part_sum import Tools
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import HEAD, Frame, Kind, PartStream

NUM_VALUES = 8
WITHIN_S = 5.0
PATIENCE_S = 1.0


class Stream:
    """Somebody's end of a stream."""

    def __init__(self, *answers: Frame | Exception | None) -> None:
        self._answers = list(answers)

    async def in_thread(self, work: Callable[[Any], Any]) -> Any:
        return await asyncio.to_thread(work, self)

    def receive(self, num_bytes: int, timeout_s: float) -> Frame | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class SlowStream(Stream):
    """Sends a little now and then, never silent for long."""

    def receive(self, num_bytes: int, timeout_s: float) -> Frame:
        time.sleep(0.3)
        return Frame(Kind.PART, 1.0, bytearray(num_bytes))


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


class Round(Reduction):
    """Our side of a round with one other peer, in which we reduce everything, or nothing if we connect to it."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        num_values: int = NUM_VALUES,
        timeout_s: float = WITHIN_S,
        connect: Callable[[str], Awaitable[PartStream]] | None = None,
        is_gone: bool = False,
    ) -> None:
        self.told: list[tuple[str, bool]] = []
        members = [
            Member(peer_id="me", epoch=0, weight=1.0, norm=3.0, can_reduce=connect is None),
            Member(peer_id="odd", epoch=0, weight=1.0, norm=1.0, can_reduce=connect is not None),
        ]
        super().__init__(
            me="me",
            group=name_group(bytes(16), members),
            contribution=torch.ones(num_values),
            num_values=num_values,
            epoch=0,
            tools=Tools(CODECS["none"], ErrorFeedback(num_values).draft(), Buffers(), thread),
            weight_cap=10.0,
            timeout_s=timeout_s,
            patience_s=PATIENCE_S,
            connect=connect or (lambda peer_id: asyncio.get_running_loop().create_future()),
            is_gone=lambda peer_id: is_gone,
            on_refused=lambda peer_id, why, is_lie: self.told.append((why, is_lie)),
            fail_at=None,
        )


@pytest.mark.parametrize(
    ("answers", "reason", "is_lie"),
    [
        ([RuntimeError("whatever")], "could not be taken (RuntimeError)", None),
        ([None], "left in the middle", None),
        ([Frame(Kind.PART, 2.0, bytearray(4 * NUM_VALUES))], "declared a weight of 1, then sent 2", True),
        ([Frame(Kind.PART, 1.0, bytearray(torch.ones(8).numpy().tobytes()))], "exceeds the norm of 1", True),
        ([Frame(Kind.PART, 1.0, bytearray(torch.full((8,), 1e38).numpy().tobytes()))], "exceeds the norm of 1", True),
    ],
)
def test_a_part_is_done_without_a_sender_that_fails(
    thread: ThreadPoolExecutor, answers: list[Frame | Exception | None], reason: str, is_lie: bool | None
) -> None:
    async def scene() -> tuple[Round, torch.Tensor]:
        reduction = Round(thread)
        running = asyncio.create_task(reduction.run())
        await asyncio.sleep(0)
        await reduction._receive(Stream(*answers), "odd")  # type: ignore[arg-type]
        return reduction, await asyncio.wait_for(running, WITHIN_S)

    reduction, average = asyncio.run(scene())
    assert reason in {**reduction.lost, **reduction.refused}["odd"]
    assert average.tolist() == pytest.approx([(2 / 3) ** 2] * NUM_VALUES)  # above twice the smaller norm, whoever sends
    assert [lie for _, lie in reduction.told] == ([] if is_lie is None else [is_lie])


def test_a_sender_that_is_never_silent_and_never_done_is_left_out_in_time(thread: ThreadPoolExecutor) -> None:
    async def scene() -> dict[str, str]:
        reduction = Round(thread, MIN_PARTS * MIN_PART_VALUES, timeout_s=0.5)
        reduction._started.add("odd")
        receiving = asyncio.create_task(reduction._receive(SlowStream(), "odd"))  # type: ignore[arg-type]
        await asyncio.wait_for(reduction.run(), PATIENCE_S + 1.0)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        return reduction.lost

    assert asyncio.run(scene()) == {"odd": "too slow"}


@pytest.mark.parametrize("is_gone", [True, False])
def test_who_said_goodbye_before_it_sent_anything_is_not_waited_for(thread: ThreadPoolExecutor, is_gone: bool) -> None:
    async def scene() -> float:
        started = time.monotonic()
        reduction = Round(thread, timeout_s=1.5, is_gone=is_gone)
        average = await asyncio.wait_for(reduction.run(), WITHIN_S)
        assert average.tolist() == pytest.approx([(2 / 3) ** 2] * NUM_VALUES)
        assert reduction.lost == {"odd": "left before it sent anything" if is_gone else "never started to send"}
        return time.monotonic() - started

    assert (asyncio.run(scene()) < 1.0) == is_gone


def test_who_does_not_read_its_averages_is_hung_up_on(thread: ThreadPoolExecutor) -> None:
    async def scene() -> None:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=far, limit=2**14)
        writer.write(HEAD.pack(Kind.PART, 1.0, 4 * MIN_PART_VALUES) + bytes(1000))  # and no more
        reduction, stream = Round(thread, MIN_PARTS * MIN_PART_VALUES, timeout_s=0.1), await open_stream(near)
        running = asyncio.create_task(reduction.run())
        with pytest.raises(ConnectionResetError), contextlib.closing(stream):
            await reduction.serve(stream, "odd")
        await running
        while await reader.read(2**20):
            pass
        writer.close()

    asyncio.run(asyncio.wait_for(scene(), WITHIN_S))


async def open_stream(end: socket.socket) -> PartStream:
    return PartStream(*await asyncio.open_connection(sock=end), Buffers(), Link())


def test_who_hardly_reads_its_averages_does_not_hold_a_thread_for_longer_than_a_round(
    thread: ThreadPoolExecutor,
) -> None:
    num_values, timeout_s = MIN_PARTS * MIN_PART_VALUES, 0.5

    async def trickle(far: asyncio.StreamReader) -> int:
        """One part in a little less than it is given; how many bytes came before it was hung up on."""
        num_bytes = 0
        while received := await far.read(4 * MIN_PART_VALUES):
            num_bytes += len(received)
            await asyncio.sleep(1.6 * timeout_s * len(received) / (4 * MIN_PART_VALUES))
        return num_bytes

    async def scene() -> int:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=far, limit=2**14)
        writer.write(HEAD.pack(Kind.PART, 1.0, 4 * MIN_PART_VALUES) + bytes(1000))  # and no more
        reduction, stream = Round(thread, num_values, timeout_s), await open_stream(near)
        serving = asyncio.create_task(reduction.serve(stream, "odd"))
        reading = asyncio.create_task(trickle(reader))
        await reduction.run()
        await reduction.drain()
        await asyncio.gather(serving, return_exceptions=True)
        num_bytes = await reading
        writer.close()
        return num_bytes

    assert asyncio.run(asyncio.wait_for(scene(), 20 * WITHIN_S)) < 0.75 * 4 * num_values


@pytest.mark.parametrize("seed", range(10))
def test_a_round_that_is_cancelled_again_and_again_hangs_up(thread: ThreadPoolExecutor, seed: int) -> None:
    """As everything is when a peer leaves: a thread that waits for the other side must not outlive it."""
    lots = random.Random(seed)

    async def scene() -> None:
        before = asyncio.all_tasks()
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=far)
        running = asyncio.create_task(Round(thread, 2**17, connect=lambda peer_id: open_stream(near)).run())
        await reader.readexactly(4 * HEAD.size + GROUP_ID_BYTES + 4 * 2**17)  # everything: it only waits now
        writer.write(HEAD.pack(Kind.AVERAGE, 0.0, 4 * MIN_PART_VALUES) + bytes(1000))  # and no more
        await asyncio.sleep(0.05)
        while not running.done():
            tasks = list(asyncio.all_tasks() - before)
            for task in lots.sample(tasks, len(tasks)):
                task.cancel()
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    asyncio.run(asyncio.wait_for(scene(), WITHIN_S))
