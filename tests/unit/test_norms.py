"""Norms: what is declared, who is clipped, and that no honest peer ever exceeds what it declared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_core.averaging.codecs import CODECS
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Member, Part, close_group, name_group
from collab_core.averaging.norms import check_norm, clip_factors, largest_squared_norm, squared_norm

NORM = st.floats(1e-6, 1e6)


def factors(*senders: tuple[float, float]) -> list[float]:
    """Factors of senders of such weights and norms."""
    names = [str(number) for number in range(len(senders))]
    weights = {name: weight for name, (weight, _) in zip(names, senders, strict=True)}
    norms = {name: norm for name, (_, norm) in zip(names, senders, strict=True)}
    return list(clip_factors(weights, norms).values())


def test_who_is_far_above_the_median_is_scaled_below_twice_of_it_and_the_louder_the_less() -> None:
    assert factors((8, 1.0), (8, 1.5), (8, 1.0), (8, 10.0)) == [1.0, 1.0, 1.0, pytest.approx(0.04)]
    left = [norm * factors((8, 1.0), (8, 1.0), (8, norm))[2] for norm in (1.0, 2.0, 2.01, 4.0, 10.0, 1e6)]
    assert left[:2] == [1.0, 2.0]
    assert left[1:] == sorted(left[1:], reverse=True)


def test_of_two_the_smaller_one_counts_and_one_alone_is_never_clipped() -> None:
    assert factors((8, 1.0), (8, 10.0)) == [1.0, pytest.approx(0.04)]
    assert factors((8, 1e30)) == [1.0]


def test_zeros_say_nothing_about_what_is_typical() -> None:
    assert factors((8, 0.0), (8, 0.0), (8, 3.0)) == [1.0, 1.0, 1.0]
    assert factors((8, 0.0)) == [1.0]


def test_a_few_samples_may_be_noisier_but_claiming_few_gains_nothing() -> None:
    assert factors((64, 1.0), (64, 1.0), (4, 4.0)) == [1.0, 1.0, 1.0]
    for weight in (1e-9, 0.1, 1.0, 16.0, 64.0):
        factor = factors((64, 1.0), (64, 1.0), (weight, 1e9))[2]
        assert weight * factor * 1e9 <= 64 * 2 * 1.000001


@given(st.lists(NORM, min_size=3, max_size=9), st.data())
def test_a_hostile_minority_moves_nobody_past_twice_the_largest_honest_norm(
    norms: list[float], data: st.DataObject
) -> None:
    num_hostile = (len(norms) - 1) // 2
    hostile = data.draw(st.lists(st.floats(0, 1e300), min_size=num_hostile, max_size=num_hostile))
    honest = norms[num_hostile:]
    everyone = [*hostile, *honest]
    for norm, factor in zip(everyone, factors(*((8, norm) for norm in everyone)), strict=True):
        assert 0 <= factor <= 1
        assert norm * factor <= 2 * max(honest) * 1.000001


@given(st.lists(NORM, min_size=1, max_size=9).map(lambda norms: [min(norms) * (1 + norm % 1) for norm in norms]))
def test_norms_within_a_factor_of_two_are_never_clipped(norms: list[float]) -> None:
    assert factors(*((8, norm) for norm in norms)) == [1.0] * len(norms)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, -1e-9])
def test_a_norm_that_is_none_is_refused_in_words(norm: float) -> None:
    assert "is not the norm" in check_norm(norm)
    assert not check_norm(0.0)
    assert not check_norm(1e30)


def test_squares_that_overflow_float32_are_still_added_up() -> None:
    assert squared_norm(torch.full((4,), 1e30)) == pytest.approx(4e60, rel=1e-6)
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert math.isinf(squared_norm(torch.tensor([1.0, -math.inf])))
    assert largest_squared_norm(1e300, 8, CODECS["fp16"]) == math.inf


def worst_for(codec: str, size: int) -> torch.Tensor:
    """One large value in every group, all others just above half a level: everything is rounded up."""
    levels = {"int8": (127, 256), "int4": (7, 64)}.get(codec, (1, 64))
    values = torch.full((size,), 0.5001)
    values[:: levels[1]] = levels[0]
    return values


@settings(max_examples=150, deadline=None)
@given(
    codec=st.sampled_from([*CODECS]),
    size=st.sampled_from([1, 63, 64, 257, 5000]),
    kind=st.sampled_from(["normal", "worst", "steep", "sparse"]),
    scale=st.sampled_from([1e-30, 3.1e-8, 1e-4, 1.0, 1e4, 1e9]),
    seed=st.integers(0, 2**31),
)
def test_no_honest_peer_exceeds_its_declaration(codec: str, size: int, kind: str, scale: float, seed: int) -> None:
    """Whatever the codec does to the values, and wherever the parts begin."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        "normal": lambda: torch.randn(size, generator=generator),
        "worst": lambda: worst_for(codec, size),
        "steep": lambda: torch.randn(size, generator=generator).pow(9),
        "sparse": lambda: torch.where(torch.rand(size, generator=generator) < 0.01, 1.0, 1e-6),
    }[kind]() * scale
    norm = ErrorFeedback(size).norm(values, 1.0, torch.empty(50))
    start = seed % size
    part = values[start:]
    payload, decoded = bytearray(CODECS[codec].encoded_bytes(len(part))), torch.empty(len(part))
    assert CODECS[codec].encode(part, payload, decoded)
    assert squared_norm(decoded) <= largest_squared_norm(norm, len(part), CODECS[codec])


@pytest.mark.parametrize("codec", [*CODECS])
def test_the_slack_of_a_codec_is_small(codec: str) -> None:
    assert largest_squared_norm(1.0, 10**6, CODECS[codec]) <= 1.6**2 * 1.02


def test_what_is_owed_counts() -> None:
    feedback = ErrorFeedback(10)
    values, scratch = torch.full((10,), 3.0), torch.empty(4)
    assert feedback.norm(values, 2.0, scratch) == pytest.approx(math.sqrt(90))
    feedback.store(torch.full((10,), -4.0), [Part(0, 10)], 160.0)
    assert feedback.norm(values, 2.0, scratch) == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("decay", [1.0, 0.95])
@pytest.mark.parametrize("share", [1e-4, 1e-2, -1e-2, 1.0, -0.5])
def test_what_is_declared_is_the_norm_or_a_little_more(whole: bool, decay: float, share: float) -> None:
    """Also if only some parts were lost, of which nobody has added up the squares."""
    feedback, scratch, weight = ErrorFeedback(1000, decay), torch.empty(64), 4.0
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for start in (0, 500):
        draft = feedback.draft()
        parts = [Part(0, 500), Part(500, 1000)] if whole else [Part(start, start + 500)]
        for part in parts:
            lost = share * values[part.start : part.stop]
            draft.note(part, lost, torch.zeros(part.num_values), weight)
        draft.commit()
    assert feedback.residue is not None
    exact = float((values.double() + feedback.residue.double() / weight).norm())
    assert exact * (1 - 1e-6) <= feedback.norm(values, weight, scratch) <= 1.021 * exact


def test_a_leader_that_tells_two_peers_different_things_sends_them_to_different_groups() -> None:
    fields = {"epoch": 1, "weight": 8.0, "can_reduce": True}
    members = [Member(peer_id=name, norm=1.0, **fields) for name in "ab"]
    token = bytes(16)
    group = close_group(token, "a", members)
    assert name_group(token, group.members) == group
    assert group.norms == {"a": 1.0, "b": 1.0}
    told = [members[0], members[1].model_copy(update={"norm": 2.0})]
    assert name_group(token, told).group_id != group.group_id
    assert name_group(token[:-1] + b"x", members).group_id != group.group_id


def test_whoever_took_more_steps_may_have_come_further_where_steps_add_up() -> None:
    weights = {"a": 100.0, "b": 100.0, "c": 400.0, "d": 100.0}
    norms = {"a": 1.0, "b": 1.0, "c": 4.0, "d": 1.0}
    assert set(clip_factors(weights, norms, adds_up=True).values()) == {1.0}
    assert clip_factors(weights, norms)["c"] == 0.25, "a mean gradient does not grow with its samples"
    assert clip_factors(weights, {**norms, "a": 4.0}, adds_up=True)["a"] == 0.25, "nobody comes so far in few steps"
