"""The arithmetic of gossip: averages that conserve, sketches that measure, votes that end a run, books that agree."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from collab_core.gossip import Agreement, Convergence, Journal, Kept, Sketcher, moved, num_rounds
from collab_core.gossip.convergence import is_flat, theil_sen_slope
from collab_core.gossip.mean import CHUNK_VALUES, Share, weighted_mean
from collab_core.gossip.sketch import SIZE, from_bytes, squared_distance, squared_length, to_bytes
from collab_core.run import RunSettings
from collab_core.run.settings import GossipSettings
from collab_core.state.backup import read_backup, write_backup
from collab_core.state.layout import Layout
from collab_core.state.snapshot import Snapshot

SEED = bytes(range(32))
values = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40)
weights = st.floats(1.0, 1e8)


def vector(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


# --- the mean ---


@settings(max_examples=200, deadline=None)
@given(values, weights, weights, st.randoms(use_true_random=False))
def test_a_meeting_conserves_the_weighted_sum_and_gives_both_sides_the_same_bits(
    some: list[float], n1: float, n2: float, chance: random.Random
) -> None:
    one, other = torch.tensor(some), torch.tensor(chance.sample(some, len(some)))
    mean = weighted_mean(Share("a", one, n1), Share("b", other, n2))
    assert torch.equal(mean, weighted_mean(Share("b", other, n2), Share("a", one, n1)))
    before = n1 * one.double() + n2 * other.double()
    after = (n1 + n2) * mean.double()
    largest = torch.maximum(one.abs(), other.abs()).double() * (n1 + n2)
    assert bool(((after - before).abs() <= 2.0**-23 * largest + 1e-30).all())
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    assert bool(((mean >= low) & (mean <= high)).all())


def test_equal_models_stay_as_they_are_and_long_vectors_are_averaged_to_their_end() -> None:
    one, other = vector(CHUNK_VALUES + 7, 1), vector(CHUNK_VALUES + 7, 2)
    assert torch.equal(weighted_mean(Share("a", one, 3), Share("b", one.clone(), 7)), one)
    mean = weighted_mean(Share("a", one, 1), Share("b", other, 3))
    assert torch.allclose(mean, 0.25 * one + 0.75 * other, atol=1e-6)


def test_many_meetings_lead_everyone_to_the_weighted_mean() -> None:
    chance = random.Random(0)
    sizes = [1.0, 2.0, 5.0, 40.0, 7.0, 1.0, 12.0, 3.0]
    models = [vector(50, seed) for seed in range(len(sizes))]
    target = sum(n * model.double() for n, model in zip(sizes, models, strict=True)) / sum(sizes)
    for _ in range(60 * len(sizes)):
        i, j = chance.sample(range(len(sizes)), 2)
        mean = weighted_mean(Share(str(i), models[i], sizes[i]), Share(str(j), models[j], sizes[j]))
        models[i], models[j] = mean, mean.clone()
    for model in models:
        assert torch.allclose(model.double(), target, atol=1e-5)


def test_what_was_learnt_since_stays_on_top_of_the_mean_and_nothing_is_rounded_if_nothing_was() -> None:
    old, mean = vector(1000, 1), vector(1000, 2)
    assert torch.equal(moved(old.clone(), old, mean), mean)
    learnt = torch.full_like(old, 0.5)
    assert torch.allclose(moved(old + learnt, old, mean), mean + learnt, atol=1e-6)


# --- sketches ---


def test_the_distance_of_sketches_is_about_that_of_models() -> None:
    origin = vector(20_000, 0)
    ratios = []
    for seed in range(30):
        sketcher = Sketcher(bytes([seed]) * 8, origin)
        one, other = origin + vector(20_000, 2 * seed + 1), origin + 0.1 * vector(20_000, 2 * seed + 2)
        estimate = squared_distance(sketcher.sketch(one), sketcher.sketch(other))
        ratios.append(estimate / float(((one - other) ** 2).sum()))
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.15)
    assert np.std(ratios) == pytest.approx(math.sqrt(2 / SIZE), abs=0.1)


def test_sketches_begin_at_zero_are_linear_and_travel_as_bytes() -> None:
    origin, step = vector(3000, 0), vector(3000, 1)
    sketcher = Sketcher(SEED, origin)
    assert squared_length(sketcher.sketch(origin)) == 0
    once, twice = sketcher.sketch(origin + step), sketcher.sketch(origin + 2 * step)
    assert np.allclose(twice, 2 * once, atol=1e-3)
    assert np.array_equal(from_bytes(to_bytes(once)), once)
    assert from_bytes(b"short") is None
    assert from_bytes(np.full(SIZE, np.nan, "<f4").tobytes()) is None
    assert not np.array_equal(once, Sketcher(bytes(8), origin).sketch(origin + step)), "the seed does not matter"


# --- the end of a run ---


def test_the_slope_is_that_of_most_whatever_a_few_say() -> None:
    assert theil_sen_slope([3.0, 2.0, 1.0, 0.0]) == pytest.approx(-1.0)
    assert theil_sen_slope([3.0, 2.0, 1.0, 0.0, -1.0, 50.0, -3.0]) == pytest.approx(-1.0)


def test_a_loss_is_flat_only_after_every_window_was() -> None:
    chosen = GossipSettings(window=4, num_windows=3, plateau=0.01)
    falling, flat = [4.0, 3.5, 3.0, 2.5], [2.0, 2.001, 1.999, 2.0]
    assert not is_flat(flat * 2, chosen), "too early"
    assert not is_flat(falling + flat * 2, chosen)
    assert is_flat(falling + flat * 3, chosen)
    assert is_flat([1.0, 1.1, 1.2, 1.3] * 3, chosen), "a loss that rises falls no more"


def test_a_peer_votes_for_the_end_when_it_agrees_with_the_others_and_learns_nothing_more() -> None:
    chosen = GossipSettings(window=2, num_windows=1)
    origin = torch.zeros(5000)
    sketcher = Sketcher(SEED, origin)
    here = vector(5000, 1)
    mine, near, far = (sketcher.sketch(v) for v in (here, here + 0.01 * vector(5000, 2), vector(5000, 3)))
    alone = Convergence(chosen)
    assert alone.distance is None
    for loss in (1.0, 1.0):
        assert not alone.votes
        alone.observe(mine, [], loss)
    assert alone.votes, "who is alone agrees with everybody"

    apart = Convergence(chosen)
    for _ in range(3):
        apart.observe(mine, [far, near], 1.0)
    assert apart.distance == pytest.approx(0.5, rel=0.6)
    assert not apart.votes
    for _ in range(30):
        apart.observe(mine, [near, near], 1.0)
    assert apart.distance is not None
    assert apart.distance < 1e-3
    assert apart.votes
    distance = apart.distance
    apart.observe(mine, [sketcher.sketch(torch.full((5000,), 3e38))], 1.0)
    assert apart.distance == distance, "a sketch that overflows says nothing"
    apart.observe(mine, [near], 0.5)
    assert not apart.votes, "it learns again"
    apart.observe(mine, [near], math.nan)
    assert not apart.votes, "what is not finite is no loss"


@pytest.mark.parametrize(("fall", "is_over"), [(0.0, True), (0.01, False)])
def test_losses_that_differ_by_more_than_what_counts_as_falling_end_a_run_but_not_one_that_learns(
    fall: float, is_over: bool
) -> None:
    """As eight peers of the benchmark saw them: off by 0.12 % from round to round."""
    chance = random.Random(0)
    chosen = GossipSettings(stop="converged", window=10)
    sketch = np.ones(SIZE, dtype=np.float32)
    peers, agreement = [Convergence(chosen) for _ in range(8)], Agreement()
    ended = None
    for number in range(300):
        for peer in peers:
            level = 0.34 * (1 - fall) ** (number / chosen.window)
            peer.observe(sketch, [sketch] * 7, chance.gauss(level, 0.0012 * level))
        if ended is None and agreement.observe([peer.votes for peer in peers]):
            ended = number
    assert (ended is not None and ended < 150) == is_over, ended


def test_a_run_is_over_when_four_of_five_have_agreed_for_long_enough() -> None:
    agreement = Agreement()
    most = [True] * 4 + [False]
    rounds = num_rounds(2, 5)
    assert rounds == 5
    assert [agreement.observe(most) for _ in range(rounds - 1)] == [False] * (rounds - 1)
    assert not agreement.observe([True] * 3 + [False] * 2), "too few"
    assert [agreement.observe(most) for _ in range(rounds)] == [False] * (rounds - 1) + [True], "it begins anew"
    assert num_rounds(3, 8) == 9
    assert num_rounds(3, 1) == 1


# --- on disk ---


def test_the_journal_names_what_a_restored_model_does_not_hold_and_survives_damage(tmp_path: Path) -> None:
    ids = [f"{number:032x}" for number in range(4)]
    journal = Journal(tmp_path / "exchanges.json", "run")
    for number, exchange in enumerate(ids):
        journal.add(exchange, f"peer-{number}")
    journal.remove(ids[3])
    again = Journal(tmp_path / "exchanges.json", "run")
    assert [(entry.exchange, entry.partner) for entry in again.reconcile(ids[:2])] == [(ids[2], "peer-2")]
    assert Journal(tmp_path / "exchanges.json", "run").reconcile(ids[:2]) == [], "it is told once"
    assert Journal(tmp_path / "exchanges.json", "another run").reconcile([]) == []
    (tmp_path / "exchanges.json").write_bytes(b'{"run_id": "run", "exchanges": [{"exchange": 3, "partner": "x"}]}')
    assert Journal(tmp_path / "exchanges.json", "run").reconcile([]) == []


def test_a_backup_holds_the_model_and_exactly_the_exchanges_in_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    layout = Layout.of(model)
    kept = Kept(values=layout.read(model), epoch=7, exchanges=[f"{number:032x}" for number in range(3)], samples=5)
    for original in (kept, Kept(values=kept.values, epoch=0, exchanges=[], samples=0)):
        path = tmp_path / "backup.collab"
        write_backup(path, "run", Snapshot(original.epoch, original.tensors(layout)), {}, {"samples": original.samples})
        backup = read_backup(path, "run")
        assert backup is not None
        again = Kept.of(layout, backup)
        assert torch.equal(again.values, original.values)
        assert (again.epoch, list(again.exchanges), again.samples) == (
            original.epoch,
            original.exchanges,
            original.samples,
        )


# --- the run file ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": {"name": "gossip"}}, "codec"),
        ({"strategy": {"name": "gossip", "codec": "none"}, "optimizer": {"name": "adamw8bit"}}, "'diloco': it is not"),
        ({"gossip": {"stop": "converged"}}, "only for strategy.name = 'gossip'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunSettings.model_validate({"name": "x", **changes})
