"""When to leave: after the hours a volunteer gave, or before a notebook's own limit ends everything at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARGIN_S = 600.0  # to leave before a notebook's limit; some end a little early
CLEANLY_S = 10.0  # what leaving takes
MAX_CLEANLY = 0.1  # of the time that was given

# How long a session lasts, as the providers say; what gives them away in the environment.
KAGGLE, KAGGLE_TPU, COLAB = 12 * 3600.0, 9 * 3600.0, 12 * 3600.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Leave in so many seconds, for this reason."""

    seconds: float
    reason: str


def time_limit(
    hours: float | None, environ: Mapping[str, str] = os.environ, session_age_s: float | None = None
) -> TimeLimit | None:
    """The first limit that we will meet, if any; leaving is over by then.

    Args:
        hours: what the volunteer gave.
        environ: of this process.
        session_age_s: how long this machine or container has been up; None: look.
    """
    limits = []
    if hours is not None and math.isfinite(hours):
        seconds = hours * 3600
        limits.append(TimeLimit(seconds - min(CLEANLY_S, MAX_CLEANLY * seconds), f"--hours {hours:g}"))
    if (session := _session(environ)) is not None:
        name, length_s = session
        left_s = length_s - (_age() if session_age_s is None else session_age_s)
        if left_s > 0:  # otherwise it is one that lasts longer than we know
            words = f"a session of {name} ends after {length_s / 3600:.0f} hours"
            limits.append(TimeLimit(max(left_s - MARGIN_S, left_s / 2), words))
    return min(limits, key=lambda limit: limit.seconds, default=None)


def _session(environ: Mapping[str, str]) -> tuple[str, float] | None:
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return "Kaggle", KAGGLE_TPU if "TPU_WORKER_ID" in environ else KAGGLE
    if "COLAB_RELEASE_TAG" in environ:
        return "Colab", COLAB
    return None


def _age() -> float:
    """Seconds since the first process here started: a notebook's container starts with its session."""
    try:
        ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
