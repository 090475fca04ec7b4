"""One arm's trainings on one text, seen together."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from benchmarks.losses.arms import Arm
from benchmarks.losses.costs import NUM_VALUES, Cost, Links
from benchmarks.record import Entry

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's, two-sided, by the number of seeds


@dataclass(frozen=True)
class Result:
    """An arm with one entry per seed."""

    arm: Arm
    entries: list[Entry]
    num_values: int
    """Of the model that was trained."""
    links: Links

    @cached_property
    def finals(self) -> list[float]:
        return [entry["losses"][-1] for entry in self.entries]

    @property
    def loss(self) -> float:
        return statistics.mean(self.finals)

    @cached_property
    def curve(self) -> list[tuple[int, float]]:
        """Steps, and the mean of the seeds' losses."""
        losses = zip(*(entry["losses"] for entry in self.entries), strict=True)
        return [(step, statistics.mean(each)) for step, each in zip(self.entries[0]["steps"], losses, strict=True)]

    @cached_property
    def cost(self) -> Cost:
        sent = statistics.mean(entry["sent"][-1] for entry in self.entries)
        return self.links.cost_of(self.arm, sent / self.arm.num_steps * NUM_VALUES / self.num_values)

    def relative_to(self, other: Result) -> list[float]:
        """How much worse than another arm, in per cent, seed by seed."""
        theirs = {entry["repeat"]: entry["losses"][-1] for entry in other.entries}
        pairs = [(entry["losses"][-1], theirs.get(entry["repeat"])) for entry in self.entries]
        return [100 * (mine / its - 1) for mine, its in pairs if its is not None]

    def steps_to(self, target: float) -> float | None:
        """When the curve first reaches a loss, on straight lines between its points; None: never."""
        before: tuple[int, float] | None = None
        for step, loss in self.curve:
            if loss <= target:
                if before is None:
                    return step
                return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            before = step, loss
        return None

    def seconds_to(self, target: float) -> float | None:
        steps = self.steps_to(target)
        return None if steps is None else steps * self.cost.seconds


def interval(values: list[float], digits: int = 3) -> str:
    """The mean, and how far it may be off with 95 % confidence."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) not in T_95:
        return mean
    return f"{mean} ± {T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
