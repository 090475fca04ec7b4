"""One round, from inside: whatever a sender's stream does, nobody waits for its part for ever."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Member, name_group
from collab_core.averaging.part_sum import Tools
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Frame, Kind

NUM_VALUES = 8
WITHIN_S = 5.0


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
