"""Rows of values that share a scale. A scale is a positive float32 cut to its upper half, so it takes two bytes."""

from __future__ import annotations

import math

import torch

MAX_FLOAT = torch.finfo(torch.float32).max
TINY = 2.0**-100  # a row in which nothing is larger counts as zeros: products of denormal numbers differ by machine


def rows_of(values: torch.Tensor, length: int) -> torch.Tensor:
    """The values in rows; the last one is filled up with zeros."""
    missing = -len(values) % length
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, length)


def num_rows(num_values: int, length: int) -> int:
    return math.ceil(num_values / length)


def pack_scales(scales: torch.Tensor, *, most: float) -> torch.Tensor:
    """Two bytes each, rounded up, so that what was divided by a scale is not larger than before.

    Args:
        scales: not negative.
        most: what a scale will be multiplied with at most; the product stays finite.
    """
    scales = torch.where(scales < TINY, 0.0, scales)
    bits = (scales.view(torch.int32) + 0xFFFF) >> 16
    greatest = int(torch.tensor(MAX_FLOAT / most).view(torch.int32)) >> 16
    return bits.clamp_(max=greatest).to(torch.int16)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """As float32. What nobody packed may be anything: NaN, infinite, negative."""
    return (packed.to(torch.int32) << 16).view(torch.float32)


def divided(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Every row in units of its scale; zeros where that is zero."""
    divisors = torch.where(scales == 0, torch.inf, scales)
    return rows / divisors.unsqueeze(1)
