"""Trainers that go their own way between rounds, and are one run all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import SwarmOfProcesses
from processes import BLIND_GUESS, wait_until, write_run

from swarm.test_run import assert_never_goes_back, assert_same_history

pytestmark = pytest.mark.timeout(300)


def test_replicas_stay_identical_with_local_steps_and_four_bits_and_a_restart_brings_all_along(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path,
        strategy__name="diloco",
        strategy__codec="int4",
        strategy__local_steps=24,
        strategy__fragments=3,
        strategy__overlap_steps=4,
        strategy__matchmaking_time_s=3.0,
        optimizer__warmup_epochs=0,
        checkpoints__evaluate=1,
    )
    aux = swarm.aux(run)
    first, second = swarm.trainer("first"), swarm.trainer("second", "--client-mode", "--batch-size", "4")
    for peer in (aux, first, second):
        peer.wait_for_epoch(4)
    assert first.stop() == 0, first.tail()
    owed = list(first.state_dir.glob("feedback*.collab"))
    assert owed  # of one fragment at least

    again, third = swarm.trainer("first"), swarm.trainer("third")
    left_at = first.wait_for("left")["epoch"]
    for peer in (again, third):
        peer.wait_for_epoch(left_at + 4)
    assert again.wait_for("restored")["epoch"] == left_at
    assert not any(path.exists() for path in owed), "it is paid by now; whoever is killed must not pay again"
    losses = [event["held_out_loss"] for event in aux.events("evaluated")]
    assert losses[-1] < 0.7 * BLIND_GUESS, losses
    for peer in (again, second, third, aux):
        assert peer.stop() == 0, peer.tail()
        assert_never_goes_back(peer)
    assert_same_history(aux, again, second, third)


def test_a_trainer_that_is_cut_off_works_on_and_brings_all_of_it_when_somebody_is_back(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    run = write_run(
        tmp_path,
        strategy__name="diloco",
        strategy__local_steps=24,
        strategy__matchmaking_time_s=2.0,
        optimizer__warmup_epochs=0,
    )
    aux, trainer = swarm.aux(run), swarm.trainer("trainer", "--client-mode")
    trainer.wait_for_epoch(2)
    aux.kill()
    num_events = len(trainer.events())
    trainer.wait_for("waiting", after=num_events)

    def num_blocks() -> int:
        return int(json.loads((trainer.state_dir / "data.json").read_bytes())["position"]["next"])

    before = num_blocks()
    wait_until(lambda: num_blocks() > before + 1, "samples for more than one round to be read", 90)
    swarm.aux(run)
    last = trainer.last_epoch()
    taken = trainer.wait_for("epoch", lambda event: event["epoch"] > last and event["members"])
    assert taken["samples"] > 2 * 24 * 8, "what was done while nobody was there"
