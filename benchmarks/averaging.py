"""Seconds to average 25 M float32 values held in 200 tensors, between 2 and 4 processes on one machine.

Arms: gloo (no daemon, no encryption, no fault tolerance); the floor (the bytes of one round through libp2p daemons,
with no arithmetic); pipes (the same, carried as our rounds carry their bytes); stock hivemind; ours. Every arm holds
its tensors where it averages them, so nobody's clock has copies in or out. hivemind's clock runs from the moment its
group is complete to the end of the all-reduce; ours has the matchmaking in it.
"""

from __future__ import annotations

import statistics

from benchmarks.record import Entry
from benchmarks.suite import Suite
from benchmarks.team import run_team

SHAPE = (125_000,)
NUM_TENSORS = 200
NUM_VALUES = NUM_TENSORS * SHAPE[0]
NUM_ROUNDS = 4  # per start; the first one is a warm-up
TIMEOUT_S = 300


def measure(arm: str, size: int) -> Entry:
    reports = run_team(f"benchmarks.arms.{arm}", [], size, TIMEOUT_S)
    rounds = [max(times) for times in zip(*(report["seconds"] for report in reports), strict=True)][1:]
    digests = {tuple(report["digests"]) for report in reports}
    return {
        "seconds": statistics.median(rounds),
        "cpu_seconds": sum(report["cpu_seconds"] for report in reports) / len(rounds) / size,
        "is_identical": len(digests) == 1 if digests != {()} else None,
    }


def _is_identical(entries: list[Entry]) -> str:
    answers = {entry["is_identical"] for entry in entries}
    return "–" if answers == {None} else "yes" if answers == {True} else "no"


SUITE = Suite(
    title="Averaging 25 M values in 200 tensors",
    sizes=(2, 4),
    unit_of_size="processes",
    arms=("gloo", "floor", "pipes", "hivemind", "collab"),
    measure=measure,
    compared_with=("floor", "pipes", "hivemind"),
    columns={"same bytes everywhere": _is_identical},
)
