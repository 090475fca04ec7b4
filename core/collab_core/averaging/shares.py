"""Who reduces how much: shares by what each link can carry, so that nobody waits for a slow link more than needed.

In a round a trainer sends its contribution to the reducers and receives the averages, and a reducer does the same for
everybody else. So with the share s of a vector V, a member sends V - s of its own and s to each of the others, and it
receives as much. A slow link is busy enough with its own contribution: it gets a small share, or none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

NUM_HALVINGS = 60
ALIKE = 2.0
MIN_SHARE = 2**12  # values
UNKNOWN_RATE = 1e6  # if nobody knows, all are alike, and how fast does not matter


@dataclass(frozen=True, slots=True)
class Load:
    """What a member does in a round."""

    can_reduce: bool
    sends: bool
    receives: bool
    upload: float
    """Bytes per second; 0 if unknown."""
    download: float


def divide(num_values: int, loads: Sequence[Load]) -> list[int]:
    """How many values each member reduces; the same on every machine, as it uses only + - × ÷.

    Bisects the duration of the round: the shortest one in which the members together can reduce everything.
    """
    loads = _few_enough(num_values, loads)
    uploads, downloads = _known([load.upload for load in loads]), _known([load.download for load in loads])
    num_senders, num_receivers = sum(load.sends for load in loads), sum(load.receives for load in loads)

    def capacities(seconds: float) -> list[float]:
        return [
            min(
                _largest_share(load.sends, num_receivers - load.receives, seconds * upload / num_values),
                _largest_share(load.receives, num_senders - load.sends, seconds * download / num_values),
            )
            if load.can_reduce
            else 0.0
            for load, upload, download in zip(loads, uploads, downloads, strict=True)
        ]

    low, high = 0.0, 2.0 * len(loads) * num_values / min(*uploads, *downloads)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(capacities(middle)) >= 1 else (middle, high)
    return _whole(num_values, capacities(high))


def _few_enough(num_values: int, loads: Sequence[Load]) -> list[Load]:
    """A small vector is reduced by few, first by those who send nothing: opening a stream takes longer than a part."""
    num_reducers = max(1, num_values // MIN_SHARE)
    ranked = sorted((index for index, load in enumerate(loads) if load.can_reduce), key=lambda i: (loads[i].sends, i))
    chosen = set(ranked[:num_reducers])
    return [replace(load, can_reduce=index in chosen) for index, load in enumerate(loads)]


def _largest_share(has_own: bool, num_others: int, budget: float) -> float:
    """The largest share, of 1, whose traffic `own × (1 - share) + others × share` fits the budget."""
    fixed, slope = float(has_own), num_others - float(has_own)
    if slope <= 0:
        return 1.0 if fixed + slope <= budget else 0.0
    return max(0.0, min(1.0, (budget - fixed) / slope))


def _known(rates: Sequence[float]) -> list[float]:
    """Who does not know its link, or has one like most, is typical: measured rates are never quite the same."""
    typical = statistics.median([rate for rate in rates if rate > 0] or [UNKNOWN_RATE])
    is_special = [rate > 0 and not typical / ALIKE <= rate <= typical * ALIKE for rate in rates]
    return [rate if special else typical for rate, special in zip(rates, is_special, strict=True)]


def _whole(num_values: int, capacities: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the capacities that add up to `num_values`."""
    total, shares, before = sum(capacities), [], 0
    reached = 0.0
    for capacity in capacities:
        reached += capacity
        upto = round(num_values * (reached / total))
        shares.append(upto - before)
        before = upto
    return shares
