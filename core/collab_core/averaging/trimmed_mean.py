"""The trimmed mean: of every value, the largest and the smallest quarter of what was sent are left out."""

from __future__ import annotations

import torch

BLOCK = 2**13  # values at once: sorting is quickest while they are in the cache


def trimmed_mean(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean of what is left of every column.

    If at most a quarter of the rows are hostile, every value of the result lies between two honest ones.
    """
    result = torch.empty(rows.shape[1])
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK]
        result[start : start + BLOCK] = _trimmed(block, weights)
    return result


def _trimmed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_trimmed = len(rows) // 4
    ordered, order = rows.sort(dim=0)
    kept = ordered[num_trimmed : len(rows) - num_trimmed]
    counts = weights[order[num_trimmed : len(rows) - num_trimmed]]
    mean = (kept * counts).sum(0) / counts.sum(0)
    return torch.minimum(torch.maximum(mean, kept[0]), kept[-1])  # whatever the rounding
