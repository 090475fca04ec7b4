"""Reductions other than the weighted mean: they look at all contributions to a part at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from collab_core.averaging.centered_clip import centered_clip
from collab_core.averaging.trimmed_mean import trimmed_mean

WEIGHT_AT_MOST = 2.0  # times the lower median

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From one row per sender and a weight for each to what everyone gets."""

REDUCTIONS: dict[str, Reduce | None] = {"mean": None, "centered-clip": centered_clip, "trimmed-mean": trimmed_mean}
"""By their name in the run file. The mean needs nothing but a sum."""


def fair_weights(weights: Sequence[float]) -> torch.Tensor:
    """Weights of which none is more than twice that of most: they are what senders say of themselves."""
    limit = WEIGHT_AT_MOST * statistics.median_low(weights)
    return torch.tensor([min(weight, limit) for weight in weights])
