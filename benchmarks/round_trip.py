"""Control-plane seconds per epoch: what an epoch takes beyond the work itself, with a small model and emulated work.

Every peer "computes" a batch by sleeping, so 2, 4 or 8 of them fit on one machine. Together they collect the target
batch in exactly WORK_S if nobody ever waits; the rest of the epoch is finding out that the batch is complete, coming
together, averaging, updating and telling. All peers know each other when the clock starts.
"""

from __future__ import annotations

import statistics

from benchmarks.record import Entry
from benchmarks.suite import Suite
from benchmarks.team import run_team

WORK_S = 2.0
NUM_BATCHES = 40  # per peer and epoch, each WORK_S / NUM_BATCHES of sleep
BATCH_SIZE = 4
NUM_EPOCHS = 10
NUM_WARM_UP = 3
WIDTH = 64  # of the model: two square layers
TIMEOUT_S = 600


def measure(arm: str, size: int) -> Entry:
    reports = run_team(f"benchmarks.arms.round_{arm}", [], size, TIMEOUT_S)
    return {
        "seconds": statistics.mean(report["seconds_per_epoch"] for report in reports) - WORK_S,
        "cpu_seconds": statistics.mean(report["cpu_seconds"] for report in reports),
    }


def _cpu(entries: list[Entry]) -> str:
    return f"{statistics.median(entry['cpu_seconds'] for entry in entries):.3f}"


SUITE = Suite(
    title=f"What an epoch costs beyond {WORK_S:g} s of work",
    sizes=(2, 4, 8),
    unit_of_size="peers",
    arms=("hivemind", "collab"),
    measure=measure,
    compared_with=("hivemind",),
    columns={"CPU s per peer and epoch": _cpu},
)
