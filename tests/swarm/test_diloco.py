"""Trainers that go their own way between rounds, and are one run all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SwarmOfProcesses
from processes import BLIND_GUESS, write_run

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
