"""One round, from inside: whatever a sender's stream does, nobody waits for its part for ever."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import MIN_PART_VALUES, MIN_PARTS, Member, name_group
from collab_core.averaging.part_sum import Tools
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Frame, Kind

NUM_VALUES = 8
WITHIN_S = 5.0
PATIENCE_S = 1.0


class Stream:
    """Somebody's end of a stream."""

    def __init__(self, *answers: Frame | Exception | None) -> None:
        self._answers = list(answers)

    async def receive(self, num_bytes: int) -> Frame | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


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
    answers: list[Frame | Exception | None], reason: str, is_lie: bool | None
) -> None:
    refused: list[tuple[str, bool]] = []

    async def scene(thread: ThreadPoolExecutor) -> tuple[list[float], dict[str, str]]:
        group = name_group(
            bytes(16),
            [
                Member(peer_id="me", epoch=0, weight=1.0, norm=3.0, can_reduce=True),
                Member(peer_id="odd", epoch=0, weight=1.0, norm=1.0, can_reduce=False),
            ],
        )
        reduction = Reduction(
            me="me",
            group=group,
            contribution=torch.ones(NUM_VALUES),
            num_values=NUM_VALUES,
            epoch=0,
            tools=Tools(CODECS["none"], ErrorFeedback(NUM_VALUES).draft(), Buffers(), thread),
            weight_cap=10.0,
            timeout_s=WITHIN_S,
            patience_s=PATIENCE_S,
            connect=lambda peer_id: asyncio.get_running_loop().create_future(),
            on_refused=lambda peer_id, why, lie: refused.append((why, lie)),
            fail_at=None,
        )
        running = asyncio.create_task(reduction.run())
        await asyncio.sleep(0)
        await reduction._receive(Stream(*answers), "odd")  # type: ignore[arg-type]
        average = await asyncio.wait_for(running, WITHIN_S)
        assert reduction._watch is not None
        reduction._watch.cancel()
        return average.tolist(), {**reduction.lost, **reduction.refused}

    with ThreadPoolExecutor(1) as thread:
        average, missing = asyncio.run(scene(thread))
    assert reason in missing["odd"]
    assert average == pytest.approx([(2 / 3) ** 2] * NUM_VALUES)  # above twice the smaller norm, whoever sends
    assert [lie for _, lie in refused] == ([] if is_lie is None else [is_lie])


class SlowStream:
    """Sends a little now and then, never silent for long."""

    async def receive(self, num_bytes: int) -> Frame:
        await asyncio.sleep(0.3)
        return Frame(Kind.PART, 1.0, bytearray(num_bytes))


def test_a_sender_that_is_never_silent_and_never_done_is_left_out_in_time() -> None:
    num_values = MIN_PARTS * MIN_PART_VALUES

    async def scene(thread: ThreadPoolExecutor) -> dict[str, str]:
        members = [
            Member(peer_id="me", epoch=0, weight=1.0, norm=1e3, can_reduce=True),
            Member(peer_id="slow", epoch=0, weight=1.0, norm=1e3, can_reduce=False),
        ]
        reduction = Reduction(
            me="me",
            group=name_group(bytes(16), members),
            contribution=torch.ones(num_values),
            num_values=num_values,
            epoch=0,
            tools=Tools(CODECS["none"], ErrorFeedback(num_values).draft(), Buffers(), thread),
            weight_cap=10.0,
            timeout_s=0.5,
            patience_s=PATIENCE_S,
            connect=lambda peer_id: asyncio.get_running_loop().create_future(),
            on_refused=lambda peer_id, why, lie: None,
            fail_at=None,
        )
        reduction._started.add("slow")
        receiving = asyncio.create_task(reduction._receive(SlowStream(), "slow"))  # type: ignore[arg-type]
        await asyncio.wait_for(reduction.run(), PATIENCE_S + 1.0)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        return reduction.lost

    with ThreadPoolExecutor(1) as thread:
        assert asyncio.run(scene(thread)) == {"slow": "too slow"}


class DeafStream:
    """Takes nothing."""

    is_closed = False

    async def send(self, frame: Frame) -> None:
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        self.is_closed = True


def test_who_does_not_read_its_averages_is_hung_up_on() -> None:
    async def scene(thread: ThreadPoolExecutor) -> None:
        member = Member(peer_id="me", epoch=0, weight=1.0, norm=3.0, can_reduce=True)
        reduction = Reduction(
            me="me",
            group=name_group(bytes(16), [member]),
            contribution=torch.ones(NUM_VALUES),
            num_values=NUM_VALUES,
            epoch=0,
            tools=Tools(CODECS["none"], ErrorFeedback(NUM_VALUES).draft(), Buffers(), thread),
            weight_cap=10.0,
            timeout_s=0.1,
            patience_s=PATIENCE_S,
            connect=lambda peer_id: asyncio.get_running_loop().create_future(),
            on_refused=lambda peer_id, why, lie: None,
            fail_at=None,
        )
        deaf = DeafStream()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reduction._send(deaf, Frame(Kind.AVERAGE)), WITHIN_S)  # type: ignore[arg-type]
        assert deaf.is_closed

    with ThreadPoolExecutor(1) as thread:
        asyncio.run(scene(thread))
