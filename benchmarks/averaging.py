"""Seconds to average 25 M float32 values held in 200 tensors, between 2 and 4 processes on one machine.

Arms: gloo (no daemon, no encryption, no fault tolerance); the floor (the bytes of one round through libp2p daemons,
with no arithmetic); stock hivemind; ours. hivemind's clock runs from the moment its group is complete to the end of the
all-reduce; ours runs from the call to the end, with matchmaking and with flattening the tensors and back.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.record import Record
from benchmarks.team import run_team

SHAPE = (125_000,)
NUM_TENSORS = 200
NUM_VALUES = NUM_TENSORS * SHAPE[0]
NUM_ROUNDS = 4  # per start; the first one is a warm-up
SIZES = (2, 4)
ARMS = ("gloo", "floor", "hivemind", "collab")
TIMEOUT_S = 300


def measure(record: Record, *, num_repeats: int) -> None:
    """Every arm in turn, again and again: what the machine does meanwhile hits all of them."""
    for repeat in range(num_repeats):
        for size in SIZES:
            for arm in ARMS:
                if record.has(arm=arm, size=size, repeat=repeat):
                    continue
                reports = run_team(f"benchmarks.arms.{arm}", [], size, TIMEOUT_S)
                rounds = [max(times) for times in zip(*(report["seconds"] for report in reports), strict=True)][1:]
                digests = {tuple(report["digests"]) for report in reports}
                record.add(
                    {
                        "arm": arm,
                        "size": size,
                        "repeat": repeat,
                        "seconds": statistics.median(rounds),
                        "cpu_seconds": sum(report["cpu_seconds"] for report in reports) / len(rounds),
                        "is_identical": len(digests) == 1,
                    }
                )
                print(f"{repeat + 1}/{num_repeats} {arm:<9} {size} processes: {record.entries[-1]['seconds']:.3f} s")


def table(record: Record) -> str:
    lines = [
        "| processes | arm | seconds (median) | best – worst | × floor | × hivemind | same bytes everywhere |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        medians = {arm: statistics.median(record.values("seconds", arm=arm, size=size)) for arm in ARMS}
        for arm in ARMS:
            seconds = record.values("seconds", arm=arm, size=size)
            is_identical = all(record.values("is_identical", arm=arm, size=size))
            equal = "–" if arm == "floor" else "yes" if is_identical else "no"
            lines.append(
                f"| {size} | {arm} | {medians[arm]:.3f} | {min(seconds):.3f} – {max(seconds):.3f} "
                f"| {medians[arm] / medians['floor']:.2f} | {medians[arm] / medians['hivemind']:.2f} | {equal} |"
            )
    return "\n".join(lines)


def plot(record: Record, path: Path) -> None:
    from benchmarks.plotting import bars

    bars(
        {f"{size} processes": {arm: record.values("seconds", arm=arm, size=size) for arm in ARMS} for size in SIZES},
        title="Averaging 25 M values in 200 tensors",
        unit="seconds, lower is better",
        path=path,
    )
