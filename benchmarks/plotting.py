"""Plots for the docs, all in one style."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GREYS = ("#cbd2d9", "#9aa5b1", "#7b8794", "#52606d", "#323f4b")
RIVAL = "#e8833a"  # the last that is not ours
BLUES = ("#2f6fde", "#7aa5ef", "#b7d0f8", "#173a78")
OURS = ("collab", "allreduce", "diloco")


@contextmanager
def figure_with(*, rows: int, columns: int, size: tuple[float, float], path: Path) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, row by row; written to the path at the end."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "collab", "font.size": 10})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    yield figure, axes
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def bars(groups: Mapping[str, Mapping[str, list[float]]], *, title: str, unit: str, path: Path) -> None:
    """Groups of bars, one bar per arm: every repetition as a dot, the median as a bar.

    Args:
        groups: group → arm → the measured values.
    """
    arms = list(next(iter(groups.values())))
    colours = _colours(arms)
    width = 0.8 / len(arms)
    with figure_with(rows=1, columns=1, size=(8, 3.4), path=path) as (figure, ((axes,),)):
        for number, arm in enumerate(arms):
            label: str | None = arm
            for position, values in enumerate(group[arm] for group in groups.values()):
                if not values:  # it was given up
                    continue
                x = position + (number - (len(arms) - 1) / 2) * width
                median = statistics.median(values)
                axes.bar(x, median, width * 0.9, color=colours[arm], label=label)
                label = None
                axes.plot([x] * len(values), values, ".", color="black", markersize=3, alpha=0.6)
                axes.annotate(f"{median:.3g}", (x, max(values)), ha="center", va="bottom", fontsize=7)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_ylabel(unit)
        axes.set_title(title, loc="left", fontsize=11)
        figure.legend(frameon=False, loc="outside right upper")


def _colours(arms: list[str]) -> dict[str, str]:
    ours = [arm for arm in arms if arm.startswith(OURS)]
    others = [arm for arm in arms if arm not in ours]
    rival = {others[-1]: RIVAL} if others else {}
    return dict(zip(others, GREYS, strict=False)) | rival | dict(zip(ours, BLUES, strict=False))


def curves(panels: Mapping[str, Mapping[str, Mapping[int, float]]], *, x: str, path: Path) -> None:
    """Panels side by side, both axes logarithmic.

    Args:
        panels: unit → line → size → value.
        x: what the sizes are.
        path: of the plot.
    """
    colours = (BLUES[0], RIVAL, *GREYS[::-2])
    with figure_with(rows=1, columns=len(panels), size=(4 * len(panels), 3.6), path=path) as (_, (all_axes,)):
        for axes, (unit, lines) in zip(all_axes, panels.items(), strict=True):
            measured = {label: values for label, values in lines.items() if values}
            for (label, values), colour in zip(measured.items(), colours, strict=False):
                axes.plot(list(values), list(values.values()), ".-", color=colour, label=label)
            ticks = sorted({size for values in lines.values() for size in values})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlabel(x)
            axes.set_title(unit, loc="left", fontsize=10)
            axes.legend(frameon=False, fontsize=8)
