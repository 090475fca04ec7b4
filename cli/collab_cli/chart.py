"""A curve in block characters: enough to see at a glance whether it still falls."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
STEPS = len(BLOCKS) - 1
MAX_STRETCH = 4  # a few values are drawn wider, but not as if they were many


class Curve:
    """Mean loss by epoch."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}

    def add(self, epoch: int, loss: float) -> bool:
        """Whether it is the first of its epoch."""
        is_new = epoch not in self._sums
        total, number = self._sums.get(epoch, (0.0, 0))
        self._sums[epoch] = total + loss, number + 1
        return is_new

    def loss(self, epoch: int) -> float:
        total, number = self._sums[epoch]
        return total / number

    @property
    def has_shape(self) -> bool:
        return len(self._sums) > 1

    def values(self) -> list[float]:
        return [self.loss(epoch) for epoch in sorted(self._sums)]


def draw(values: Sequence[float], width: int, height: int) -> list[str]:
    """The curve as `height` lines with its greatest and least value at the left, newest at the right."""
    if not values:
        return []
    low, high = min(values), max(values)
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"] if height > 1 else [f"{values[0]:.2f}"]
    margin = max(map(len, labels))
    columns = _fit(values, max(width - margin - 1, 1))
    span = (high - low) or 1.0
    levels = [1 + round((value - low) / span * (height * STEPS - 1)) for value in columns]
    rows = []
    for row, label in enumerate(labels):
        base = (height - 1 - row) * STEPS
        bars = "".join(BLOCKS[min(max(level - base, 0), STEPS)] for level in levels)
        rows.append(f"{label:>{margin}} {bars.rstrip()}")
    return rows


def _fit(values: Sequence[float], width: int) -> list[float]:
    """As many values as there are columns: means of neighbours, or each of them several times."""
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        return [statistics.fmean(values[first:last]) for first, last in itertools.pairwise(edges)]
    stretch = min(width // len(values), MAX_STRETCH)
    return [value for value in values for _ in range(stretch)]
