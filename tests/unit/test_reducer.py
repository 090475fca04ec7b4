"""A reducer's parts get done whatever their senders do."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Part
from collab_core.averaging.part_sum import PartLost, PartSum, Refused, Tools
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


def average(reducer: Reducer) -> list[float]:
    reducer.done.result(WITHIN_S)
    assert reducer.listen().get(timeout=WITHIN_S) == 0
    return torch.frombuffer(reducer.result(0), dtype=torch.float32).unique().tolist()


def test_the_average_is_of_everyone(tools: Tools) -> None:
    reducer = reducer_of(tools, "first", "second")
    done = reducer.listen()
    reducer.add("first", 0, payload_of(4.0)).result(WITHIN_S)
    assert done.empty()
    assert not reducer.done.done()
    reducer.add("second", 0, payload_of(7.0)).result(WITHIN_S)
    assert average(reducer) == [4.0]
    assert done.get(timeout=WITHIN_S) == 0, "who listens from the beginning is told, too"


@pytest.mark.parametrize(("sent", "expected"), [(3.0, [2.0]), (float("nan"), [1.0])])
def test_a_sender_that_leaves_while_its_part_is_added_as_the_last_one_does_not_block_the_part(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, sent: float, expected: list[float]
) -> None:
    reducer, hold, is_adding = reducer_of(tools, "sender"), threading.Event(), threading.Event()
    add = PartSum.add

    def add_slowly(*arguments: Any) -> None:
        is_adding.set()
        hold.wait(WITHIN_S)
        add(*arguments)

    monkeypatch.setattr(PartSum, "add", add_slowly)
    adding = reducer.add("sender", 0, payload_of(sent))
    assert is_adding.wait(WITHIN_S)
    reducer.ban("sender", "left in the middle of the round")
    hold.set()
    concurrent.futures.wait([adding])
    assert average(reducer) == expected


def test_a_refused_sender_enters_nothing_and_the_part_is_done_once_it_is_banned(tools: Tools) -> None:
    reducer = reducer_of(tools, "sender")
    with pytest.raises(Refused, match="part 0 has values that are not finite"):
        reducer.add("sender", 0, payload_of(float("inf"))).result(WITHIN_S)
    assert not reducer.done.done()
    reducer.ban("sender", "not finite")
    assert average(reducer) == [1.0]


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_whatever_comes_after_a_part_is_done_changes_neither_its_bytes_nor_what_is_owed(
    tools: Tools, codec: str
) -> None:
    """A second finish would encode what the first one lost, and only this peer would use it."""
    own, mine = torch.ones(NUM_VALUES), torch.empty(NUM_VALUES)
    weights = {"me": 1.0, "junk": 1.0, "honest": 1.0}
    reducer = Reducer("me", [Part(0, NUM_VALUES)], weights, own, mine, tools)
    reducer.start()
    hold = threading.Event()
    tools.thread.submit(hold.wait, WITHIN_S)
    junk = reducer.add("junk", 0, payload_of(float("nan"), codec))
    reducer.ban("junk", "left in the middle of the round")
    honest = reducer.add("honest", 0, payload_of(4.1, codec))
    again = reducer.add("honest", 0, payload_of(4.1, codec))
    hold.set()
    concurrent.futures.wait([junk, honest, again])
    reducer.ban("honest", "sent it twice")
    reducer.done.result(WITHIN_S)
    owed = tools.feedback.sum(Part(0, NUM_VALUES)).clone()
    tools.thread.submit(lambda: None).result(WITHIN_S)  # whatever else was begun
    theirs = torch.empty(NUM_VALUES)
    tools.codec.decode(reducer.result(0), theirs)
    assert torch.equal(mine, theirs)
    assert mine[0] == pytest.approx(2.55, rel=0.05)
    assert torch.equal(tools.feedback.sum(Part(0, NUM_VALUES)), owed)


def test_a_part_to_which_nobody_is_left_is_lost_and_all_who_wait_hear_of_it(tools: Tools) -> None:
    parts = [Part(0, 4), Part(4, 8)]
    reducer = Reducer("me", parts, {"sender": 1.0}, None, torch.empty(NUM_VALUES), tools)
    reducer.start()
    done = reducer.listen()
    reducer.add("sender", 1, bytearray(torch.ones(4).numpy().tobytes())).result(WITHIN_S)
    assert done.get(timeout=WITHIN_S) == 1
    reducer.ban("sender", "left in the middle of the round")
    assert done.get(timeout=WITHIN_S) == 0
    with pytest.raises(PartLost):
        reducer.result(0)
    with pytest.raises(PartLost):
        reducer.done.result(WITHIN_S)
    assert torch.frombuffer(reducer.result(1), dtype=torch.float32).tolist() == [1.0] * 4
