"""Plots for the docs: every repetition as a dot, the median as a bar."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

COLOURS = ("#9aa5b1", "#52606d", "#e8833a", "#2f6fde")


def bars(groups: Mapping[str, Mapping[str, list[float]]], *, title: str, unit: str, path: Path) -> None:
    """Groups of bars, one bar per arm.

    Args:
        groups: group → arm → the measured values.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "collab", "font.size": 10, "axes.spines.top": False})
    from matplotlib import pyplot

    arms = list(next(iter(groups.values())))
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        for position, values in enumerate(group[arm] for group in groups.values()):
            x = position + (number - (len(arms) - 1) / 2) * width
            median = statistics.median(values)
            colour = COLOURS[number % len(COLOURS)]
            axes.bar(x, median, width * 0.9, color=colour, label=arm if position == 0 else None)
            axes.plot([x] * len(values), values, ".", color="black", markersize=3, alpha=0.6)
            axes.annotate(f"{median:.2f}", (x, max(values)), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
