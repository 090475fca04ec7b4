"""A reducer's parts get done whatever their senders do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Part
from collab_core.averaging.part_sum import Refused, Tools
from collab_core.averaging.reducer import Reducer

NUM_VALUES = 8
WITHIN_S = 5.0


@pytest.fixture
def codec() -> str:
    return "none"


@pytest.fixture
def tools(codec: str) -> Iterator[Tools]:
    with ThreadPoolExecutor(1) as thread:
        yield Tools(CODECS[codec], ErrorFeedback(NUM_VALUES).draft(), Buffers(), thread)


def payload_of(value: float, codec: str = "none") -> bytearray:
    payload = bytearray(CODECS[codec].encoded_bytes(NUM_VALUES))
    CODECS[codec].encode(torch.full((NUM_VALUES,), value), payload, torch.empty(NUM_VALUES))
    return payload


def reducer_of(tools: Tools, *senders: str) -> Reducer:
    """Reduces everything, contributes 1.0 with the weight 1, and waits for these senders of weight 1."""
    own, average = torch.ones(NUM_VALUES), torch.empty(NUM_VALUES)
    weights = {"me": 1.0} | dict.fromkeys(senders, 1.0)
    reducer = Reducer("me", [Part(0, NUM_VALUES)], weights, own, average, tools)
    reducer.start()
    return reducer


async def average(reducer: Reducer) -> list[float]:
    payload = await asyncio.wait_for(reducer.result(0), WITHIN_S)
    return torch.frombuffer(payload, dtype=torch.float32).unique().tolist()


def test_the_average_is_of_everyone(tools: Tools) -> None:
    async def scene() -> list[float]:
        reducer = reducer_of(tools, "first", "second")
        await reducer.add("first", 0, payload_of(4.0))
        await reducer.add("second", 0, payload_of(7.0))
        return await average(reducer)

    assert asyncio.run(scene()) == [4.0]


@pytest.mark.parametrize(("sent", "expected"), [(3.0, [2.0]), (float("nan"), [1.0])])
def test_a_sender_that_leaves_while_its_part_is_added_as_the_last_one_does_not_block_the_part(
    tools: Tools, sent: float, expected: list[float]
) -> None:
    async def scene() -> list[float]:
        reducer, hold = reducer_of(tools, "sender"), threading.Event()
        tools.thread.submit(hold.wait, WITHIN_S)
        adding = asyncio.create_task(reducer.add("sender", 0, payload_of(sent)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        reducer.ban("sender", "left in the middle of the round")
        hold.set()
        return await average(reducer)

    assert asyncio.run(scene()) == expected


def test_a_refused_sender_enters_nothing_and_the_part_is_done_once_it_is_banned(tools: Tools) -> None:
    async def scene() -> list[float]:
        reducer = reducer_of(tools, "sender")
        with pytest.raises(Refused, match="part 0 has values that are not finite"):
            await reducer.add("sender", 0, payload_of(float("inf")))
        reducer.ban("sender", "not finite")
        return await average(reducer)

    assert asyncio.run(scene()) == [1.0]


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_junk_of_a_sender_that_was_not_the_last_one_does_not_finish_a_part_twice(tools: Tools, codec: str) -> None:
    """A second finish would encode what the first one lost, and only this peer would use it."""

    async def scene() -> tuple[list[float], list[float]]:
        own, mine = torch.ones(NUM_VALUES), torch.empty(NUM_VALUES)
        weights = {"me": 1.0, "junk": 1.0, "honest": 1.0}
        reducer = Reducer("me", [Part(0, NUM_VALUES)], weights, own, mine, tools)
        reducer.start()
        hold = threading.Event()
        tools.thread.submit(hold.wait, WITHIN_S)
        junk = asyncio.create_task(reducer.add("junk", 0, payload_of(float("nan"), codec)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reducer.ban("junk", "left in the middle of the round")
        honest = asyncio.create_task(reducer.add("honest", 0, payload_of(4.1, codec)))
        await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(junk, honest, return_exceptions=True)
        payload = bytearray(await asyncio.wait_for(reducer.result(0), WITHIN_S))
        await asyncio.sleep(0.1)  # whatever else was begun
        await tools.run(lambda: None)
        theirs = torch.empty(NUM_VALUES)
        tools.codec.decode(payload, theirs)
        return mine.tolist(), theirs.tolist()

    mine, theirs = asyncio.run(scene())
    assert mine == theirs
    assert mine[0] == pytest.approx(2.55, rel=0.05)
