"""How long a trainer works before it meets the others."""

from __future__ import annotations

from typing import Any

import pytest

from collab_core.averaging.link import Bandwidth
from collab_core.run.settings import RunSettings
from collab_core.swarm import Peer
from collab_core.swarm.record import PeerRecord
from collab_trainer.pace import MAX_STEPS, MIN_STEPS, auto_steps, is_enough

MBIT = 1e6 / 8


def link(mbit: float) -> Bandwidth:
    return Bandwidth(download=10 * mbit * MBIT, upload=mbit * MBIT)


def test_slow_links_get_more_steps_between_rounds() -> None:
    # 1.25 MB out and as much again for others: 2 s at 10 Mbit/s; 5 % of 40 s, which are 100 steps
    assert auto_steps(2_500_000, link(10), 0.0, 0.4) == 100
    assert auto_steps(2_500_000, link(4), 0.0, 0.4) == 250
    assert auto_steps(2_500_000, link(100), 0.0, 0.4) == MIN_STEPS
    assert auto_steps(2_500_000, link(0.1), 0.0, 0.4) == MAX_STEPS


def test_whoever_goes_on_meanwhile_needs_only_steps_as_long_as_the_round() -> None:
    assert auto_steps(25_000_000, link(2), 0.0, 0.4, overlap_steps=250) == 250


def test_what_does_not_fit_the_steps_taken_meanwhile_is_waited_for() -> None:
    # 2 s are 5 steps: all of them, three of them, and none are taken meanwhile
    assert auto_steps(2_500_000, link(10), 0.0, 0.4, overlap_steps=5) == MIN_STEPS
    assert auto_steps(2_500_000, link(10), 0.0, 0.4, overlap_steps=3) == 40
    assert auto_steps(2_500_000, link(10), 0.0, 0.4, overlap_steps=0) == 100


def test_every_fragment_has_a_round_of_its_own() -> None:
    whole = auto_steps(2_500_000, link(10), 0.0, 0.4)
    assert auto_steps(2_500_000 // 4, link(10), 0.0, 0.4, num_fragments=4) == whole


def test_as_long_as_nothing_is_known_of_the_link_the_last_round_tells() -> None:
    assert auto_steps(2_500_000, Bandwidth(), 2.0, 0.4) == 100
    assert auto_steps(2_500_000, Bandwidth(), 0.0, 0.4) == MIN_STEPS
    assert auto_steps(2_500_000, Bandwidth(), 2.0, 0.0) == MIN_STEPS


def trainer(**record: Any) -> Peer:
    values = {"name": "x", "role": "trainer", "mode": "direct", "version": "0", "phase": "averaging", "time": 0.0}
    return Peer("x", PeerRecord.model_validate({**values, **record}), 0.0)


def run(**strategy: Any) -> RunSettings:
    return RunSettings.model_validate({"name": "run", "strategy": strategy, "limits": {"max_samples_per_peer": 1000}})


def test_gradients_are_enough_when_the_swarm_has_its_batch() -> None:
    settings = run(target_batch_size=100)
    assert not is_enough(settings, 40, 0, [trainer(epoch_samples=59)])
    assert is_enough(settings, 40, 0, [trainer(epoch_samples=60)])


def test_with_local_steps_the_fast_do_what_the_slow_cannot_but_not_for_ever() -> None:
    settings = run(name="diloco")
    slow = trainer(epoch_samples=20, epoch_target=100)
    assert not is_enough(settings, 100, 100, [slow])
    assert is_enough(settings, 180, 100, [slow])
    stuck = trainer(epoch_samples=0, epoch_target=100)
    assert not is_enough(settings, 199, 100, [stuck])
    assert is_enough(settings, 200, 100, [stuck])
    assert is_enough(settings, 100, 100, []), "who is alone has only its own share to do"


@pytest.mark.parametrize("claimed", [2**50, 1000])
def test_a_peer_cannot_mean_to_do_more_than_the_run_allows(claimed: int) -> None:
    liar = trainer(epoch_samples=1000, epoch_target=claimed)
    assert is_enough(run(name="diloco"), 100, 100, [liar])
