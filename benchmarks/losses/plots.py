"""Losses over what was sent, and over the time on a slow link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.losses.arms import LOCAL_STEPS
from benchmarks.losses.results import Result
from benchmarks.plotting import figure_with

COLOURS = {"alone": "#cbd2d9", "ddp": "#52606d", "hivemind": "#9aa5b1", "fedavg": "#e8833a"}
OURS = {"allreduce": "#7fb3ff", "gossip": "#8bc48a"}
CODECS = {"none": "#0b2e70", "fp16": "#1d4fb0", "int8": "#2f6fde", "int4": "#5a3fc0", "topk": "#c23b8f"}


def draw(text: str, results: Sequence[Result], path: Path) -> None:
    """Loss over megabytes sent by a peer, and over minutes at 10 Mbit/s."""
    with figure_with(rows=1, columns=2, size=(9, 3.6), path=path) as (figure, ((left, right),)):
        for result in results:
            steps, losses = zip(*result.curve, strict=True)
            style = {"color": _colour(result), "linestyle": _dashes(result), "label": result.arm.name}
            if result.cost.num_bytes:
                left.plot([step * result.cost.num_bytes / 1e6 for step in steps], losses, **style)
            right.plot([step * result.cost.seconds / 60 for step in steps], losses, **style)
        left.set_xlabel("MB sent by a peer, everything counted")
        right.set_xlabel("minutes at 10 Mbit/s")
        left.set_ylabel("held-out loss")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_title(text, loc="left", fontsize=10)
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside right upper", fontsize=8)


def _colour(result: Result) -> str:
    arm = result.arm
    return CODECS[arm.codec] if arm.kind == "diloco" else {**COLOURS, **OURS}[arm.kind]


def _dashes(result: Result) -> str:
    is_usual = result.arm.kind != "diloco" or result.arm.local_steps == LOCAL_STEPS
    if result.arm.overlap:
        return "--" if is_usual else "-."
    return "-" if is_usual else ":"
