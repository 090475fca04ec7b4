"""Reductions that a few hostile peers cannot move far."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.centered_clip import NUM_ITERATIONS, centered_clip
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Part
from collab_core.averaging.part_sum import Refused, Tools
from collab_core.averaging.reducer import Reducer
from collab_core.averaging.robust import REDUCTIONS, fair_weights
from collab_core.averaging.trimmed_mean import trimmed_mean

WITHIN_S = 5.0
HUGE = st.floats(-(2.0**100), 2.0**100, width=32)
WEIGHT = st.floats(0.1, 1e4)


def honest_rows(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) + 1


@settings(deadline=None)
@given(num_honest=st.integers(1, 9), num_hostile=st.integers(0, 3), size=st.integers(1, 20), data=st.data())
def test_a_trimmed_mean_stays_between_honest_values(
    num_honest: int, num_hostile: int, size: int, data: st.DataObject
) -> None:
    num_hostile = min(num_hostile, num_honest // 3)
    honest = honest_rows(num_honest, size, data.draw(st.integers(0, 99)))
    lies = data.draw(st.lists(st.lists(HUGE, min_size=size, max_size=size), min_size=num_hostile, max_size=num_hostile))
    rows = torch.cat([torch.tensor(lies).view(num_hostile, size), honest])
    weights = data.draw(st.lists(WEIGHT, min_size=len(rows), max_size=len(rows)))
    result = trimmed_mean(rows, fair_weights(weights))
    assert bool((result >= honest.amin(0)).all())
    assert bool((result <= honest.amax(0)).all())


def test_a_trimmed_mean_weighs_samples_and_works_in_blocks() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [1e9]]).expand(4, 20_001)
    result = trimmed_mean(rows, torch.tensor([1.0, 3.0, 1.0, 1.0]))
    torch.testing.assert_close(result, torch.full((20_001,), 2.5))
    assert trimmed_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0])).tolist() == [2.0]


@settings(deadline=None)
@given(num_honest=st.integers(1, 9), num_hostile=st.integers(0, 8), size=st.integers(1, 20), data=st.data())
def test_centered_clipping_stays_within_reach_of_the_honest(
    num_honest: int, num_hostile: int, size: int, data: st.DataObject
) -> None:
    num_hostile = min(num_hostile, num_honest - 1)
    honest = honest_rows(num_honest, size, data.draw(st.integers(0, 99)))
    lies = data.draw(st.lists(st.lists(HUGE, min_size=size, max_size=size), min_size=num_hostile, max_size=num_hostile))
    rows = torch.cat([torch.tensor(lies).view(num_hostile, size), honest])
    weights = data.draw(st.lists(WEIGHT, min_size=len(rows), max_size=len(rows)))
    result = centered_clip(rows, fair_weights(weights))
    start = rows.median(dim=0).values
    assert bool((start >= honest.amin(0)).all())
    assert bool((start <= honest.amax(0)).all())
    reach = float((honest - start).norm(dim=1).max())
    assert float((result - start).norm()) <= NUM_ITERATIONS * reach * 1.0001 + 1e-6


def test_centered_clipping_of_honest_rows_is_about_their_mean() -> None:
    rows = honest_rows(8, 10_000, 0)
    result = centered_clip(rows, torch.ones(8))
    mean = rows.mean(0)
    assert float((result - mean).norm()) < 0.05 * float(mean.norm())
    flipped = torch.cat([rows[:6], -10 * rows[6:]])
    assert float((centered_clip(flipped, torch.ones(8)) - rows[:6].mean(0)).norm()) < 0.7 * float(mean.norm())


def test_rows_that_are_equal_have_themselves_as_their_center() -> None:
    rows = torch.ones(3, 5)
    assert torch.equal(centered_clip(rows, torch.ones(3)), rows[0])


def test_nobody_weighs_more_than_twice_of_most() -> None:
    assert fair_weights([8.0, 8.0, 4096.0, 1.0]).tolist() == [8.0, 8.0, 16.0, 1.0]


def reduce_parts(
    reduction: str, codec: str, sent: dict[str, list[float]], norms: dict[str, float] | None
) -> torch.Tensor:
    """What a peer that contributes ones makes of what the others send, if it reduces everything."""
    size = len(next(iter(sent.values())))

    with ThreadPoolExecutor(1) as thread:
        tools = Tools(CODECS[codec], ErrorFeedback(size).draft(), Buffers(), thread, REDUCTIONS[reduction])
        own, average = torch.ones(size), torch.empty(size)
        weights = dict.fromkeys(("me", *sent), 1.0)
        declared = None if norms is None else {"me": math.sqrt(size), **norms}
        reducer = Reducer("me", [Part(0, size)], weights, own, average, tools, declared)
        reducer.start()
        for sender, values in sent.items():
            payload = bytearray(CODECS[codec].encoded_bytes(size))
            CODECS[codec].encode(torch.tensor(values), payload, torch.empty(size))
            reducer.add(sender, 0, payload).result(WITHIN_S)
        theirs = torch.empty(size)
        reducer.done.result(WITHIN_S)
        CODECS[codec].decode(reducer.result(0), theirs)
        assert torch.equal(theirs, average), "everyone must use the same bytes"
        return average


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize(("reduction", "expected"), [("trimmed-mean", 2.5), ("centered-clip", 2.5), ("mean", 27.5)])
def test_a_reducer_reduces_as_the_run_says(reduction: str, expected: float, codec: str) -> None:
    sent = {"first": [2.0] * 70, "second": [3.0] * 70, "hostile": [104.0] * 70}
    result = reduce_parts(reduction, codec, sent, None)
    torch.testing.assert_close(result, torch.full((70,), expected), rtol=0.2, atol=0.5)


@pytest.mark.parametrize("reduction", [*REDUCTIONS])
def test_who_declares_too_much_is_scaled_down_and_keeps_its_weight(reduction: str) -> None:
    root = math.sqrt(4)
    sent = {"first": [1.0] * 4, "loud": [-20.0] * 4}
    result = reduce_parts(reduction, "none", sent, {"first": root, "loud": 20 * root})
    if reduction == "mean":
        torch.testing.assert_close(result, torch.full((4,), 0.6))  # (1 + 1 - 20 × (2 / 20)²) / 3
    assert float(result.abs().max()) <= 1.0


@pytest.mark.parametrize("reduction", [*REDUCTIONS])
def test_who_sends_more_than_it_declared_is_refused(reduction: str) -> None:
    with pytest.raises(Refused, match="part 0 exceeds the norm of 2 that its sender declared") as refused:
        reduce_parts(reduction, "none", {"liar": [2.0] * 4}, {"liar": 2.0})
    assert refused.value.is_lie


def test_a_declaration_holds_for_all_parts_together() -> None:
    with ThreadPoolExecutor(1) as thread:
        tools = Tools(CODECS["none"], ErrorFeedback(8).draft(), Buffers(), thread)
        parts = [Part(0, 4), Part(4, 8)]
        weights, norms = {"liar": 1.0}, {"liar": 2.0}
        reducer = Reducer("me", parts, weights, None, torch.empty(8), tools, norms)
        reducer.start()
        payload = bytearray(torch.ones(4).numpy().tobytes())
        reducer.add("liar", 0, bytearray(payload)).result(WITHIN_S)
        with pytest.raises(Refused) as refused:
            reducer.add("liar", 1, bytearray(payload)).result(WITHIN_S)
    assert "part 1 exceeds the norm" in str(refused.value)


def test_a_part_is_not_lost_because_one_sender_s_cannot_be_added() -> None:
    with ThreadPoolExecutor(1) as thread:
        tools = Tools(CODECS["none"], ErrorFeedback(8).draft(), Buffers(), thread)
        reducer = Reducer("me", [Part(0, 8)], {"me": 1.0, "odd": 1.0}, torch.ones(8), torch.empty(8), tools)
        reducer.start()
        with pytest.raises(Refused, match="could not be added") as refused:
            reducer.add("odd", 0, bytearray(7)).result(WITHIN_S)
        assert not refused.value.is_lie
        reducer.ban("odd", str(refused.value))
        reducer.done.result(WITHIN_S)
        assert torch.frombuffer(reducer.result(0), dtype=torch.float32).tolist() == [1.0] * 8
