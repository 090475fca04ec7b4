"""Centered clipping (Karimireddy et al., 2021): a mean in which nobody pulls harder than most."""

from __future__ import annotations

import math
import statistics

import torch

from collab_core.averaging.norms import squared_norm

NUM_ITERATIONS = 3


def centered_clip(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Begin at the median of every column and move to the mean, each row pulling at most as far as the median row is.

    With less than half of the rows hostile the result is no further from the honest medians than three times the
    distance of an honest row.
    """
    center = rows.median(dim=0).values
    shares = weights / weights.sum()
    reach: float | None = None
    for _ in range(NUM_ITERATIONS):
        differences = rows - center
        distances = [math.sqrt(squared_norm(row)) for row in differences]
        if reach is None:
            reach = statistics.median_low(distances)
        pull = torch.tensor([reach / distance if distance > reach else 1.0 for distance in distances])
        center += (shares * pull) @ differences
    return center
