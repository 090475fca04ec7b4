"""Control-plane seconds per epoch: what an epoch takes beyond the work itself, with a small model and emulated work.

Every peer "computes" a batch by sleeping, so 2, 4 or 8 of them fit on one machine. Together they collect the target
batch in exactly WORK_S if nobody ever waits; the rest of the epoch is finding out that the batch is complete, coming
together, averaging, updating and telling. All peers know each other when the clock starts.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.record import Record
from benchmarks.team import run_team

SIZES = (2, 4, 8)
ARMS = ("hivemind", "collab")
WORK_S = 2.0
NUM_BATCHES = 40  # per peer and epoch, each WORK_S / NUM_BATCHES of sleep
BATCH_SIZE = 4
NUM_EPOCHS = 10
NUM_WARM_UP = 3
WIDTH = 64  # of the model: two square layers
TIMEOUT_S = 600


def measure(record: Record, *, num_repeats: int) -> None:
    for repeat in range(num_repeats):
        for size in SIZES:
            for arm in ARMS:
                if record.has(arm=arm, size=size, repeat=repeat):
                    continue
                reports = run_team(f"benchmarks.arms.round_{arm}", [], size, TIMEOUT_S)
                extra = [report["seconds_per_epoch"] - WORK_S for report in reports]
                cpu = sum(report["cpu_seconds"] for report in reports) / size
                entry = {"arm": arm, "size": size, "repeat": repeat, "seconds": statistics.mean(extra), "cpu": cpu}
                record.add(entry)
                print(f"{repeat + 1}/{num_repeats} {arm:<9} {size} peers: {entry['seconds']:.3f} s per epoch")


def table(record: Record) -> str:
    lines = [
        "| peers | arm | control plane, s per epoch (median) | best – worst | × hivemind | CPU s per peer and epoch |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        medians = {arm: statistics.median(record.values("seconds", arm=arm, size=size)) for arm in ARMS}
        for arm in ARMS:
            seconds = record.values("seconds", arm=arm, size=size)
            cpu = statistics.median(record.values("cpu", arm=arm, size=size))
            lines.append(
                f"| {size} | {arm} | {medians[arm]:.3f} | {min(seconds):.3f} – {max(seconds):.3f} "
                f"| {medians[arm] / medians['hivemind']:.2f} | {cpu:.3f} |"
            )
    return "\n".join(lines)


def plot(record: Record, path: Path) -> None:
    from benchmarks.plotting import bars

    bars(
        {f"{size} peers": {arm: record.values("seconds", arm=arm, size=size) for arm in ARMS} for size in SIZES},
        title=f"What an epoch costs beyond {WORK_S:g} s of work",
        unit="seconds, lower is better",
        path=path,
    )
