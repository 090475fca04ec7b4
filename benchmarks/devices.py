"""Emulated devices of different speed in one swarm: what the suites `unequal` and `churn` have in common."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from tests.processes import Event, PeerProcess, SwarmOfProcesses

from benchmarks.team import TeamFailed

BATCH_SIZE = 4
MAX_OVERRUN = 1.05
PROGRAM = ("-m", "benchmarks.arms.padded_peer")

RUN = """\
name = "devices"
[task.options]
layers = 1
width = 32
sequence_length = 64
[strategy]
name = "diloco"
local_steps = {local_steps}
overlap_steps = {overlap_steps}
codec = "int4"
[optimizer]
lr = 0.003
[checkpoints]
every = 0
evaluate = 0
"""


def start_device(swarm: SwarmOfProcesses, name: str, run: str, pad_s: float) -> PeerProcess:
    """A trainer whose steps take so long."""
    steps = swarm.folder / f"{name}.steps"
    options = ("--batch-size", str(BATCH_SIZE), "--backup-every-step", "0", "--name", name)
    return swarm.start(name, "train", run, *options, env={"PAD_S": str(pad_s), "STEPS": str(steps)}, program=PROGRAM)


def steps_of(peer: PeerProcess) -> list[tuple[float, float]]:
    """When its steps began and ended."""
    path: Path = peer.state_dir.parent.parent / f"{peer.state_dir.name}.steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(begun), float(ended)) for begun, ended in (line.split() for line in lines)]


def overrun(peer: PeerProcess, pad_s: float) -> float:
    """How much longer than its padding a step takes; raises if that is too much for the figures to mean anything."""
    steps = steps_of(peer)
    ratio = statistics.mean(ended - begun for begun, ended in steps) / pad_s if steps else 1.0
    if ratio > MAX_OVERRUN:
        raise TeamFailed(f"steps took {ratio:.2f} × their padding; the machine is too busy")
    return ratio


def next_epoch(peer: PeerProcess, timeout_s: float = 120) -> Event:
    """The next epoch from now on."""
    last = peer.last_epoch()
    return peer.wait_for("epoch", lambda event: event["epoch"] > last, timeout_s=timeout_s)


def epochs_between(peer: PeerProcess, first: Event, last: Event) -> list[Event]:
    """Epochs after the first up to the last."""
    return [event for event in peer.events("epoch") if first["epoch"] < event["epoch"] <= last["epoch"]]


def samples_in(epochs: list[Event]) -> int:
    """What ended in the model: a member that was lost in the middle of a round may have brought a part of its share."""
    return sum(event["samples"] - sum(event["members"].get(name, 0) for name in event["lost"]) for event in epochs)


def wait_until_time(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))
