"""How large a contribution may be: everyone declares a norm when it joins, and is held to it.

Who declares much more than most is scaled down; who sends more than it declared is refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

from collab_core.averaging.codecs import Codec

CLIP_AT = 2.0  # times the typical norm
NOTABLE = 0.9  # a factor below this is worth telling
BLOCK = 2**18
# Squares are added up in float32, here and at the sender in another order. A sum of 2**20 squares in at least eight
# lanes is off by at most 2**17 roundings of 2**-24 each: 0.8 %, once at each end.
ROUNDING = 1.02
NOTHING = 1e-24  # squares too small for float32 are zeros for one and not for the other


def squared_norm(values: torch.Tensor) -> float:
    """The sum of the squares; infinite or NaN only if one of the values is."""
    squared = float(torch.dot(values, values))
    return squared if math.isfinite(squared) else float(values.double().square_().sum())


def check_norm(norm: float) -> str:
    """Why a declared norm is refused; empty if it is fine."""
    return "" if math.isfinite(norm) and norm >= 0 else f"norm {norm!r} is not the norm of a contribution"


def clip_factors(
    weights: Mapping[str, float], norms: Mapping[str, float], *, adds_up: bool = False
) -> dict[str, float]:
    """What every sender's values are multiplied with, so that its norm is at most twice a typical one.

    Beyond that, the louder the less: scaled to the limit alone, two of eight that send ten times the opposite would
    still cancel most of what the others bring, so what exceeds the limit k times counts as a k-th of the limit.

    Typical is the lower median of what the others' norms would be with as many samples as this sender has. Fewer
    samples mean more noise: at most by the root of their ratio, so that nobody gains influence by claiming few. Zeros
    say nothing about what is typical.

    Args:
        weights: samples of every sender.
        norms: what they declared.
        adds_up: contributions are ways that were gone, step by step: whoever took four times the steps may have come
            four times as far.
    """
    known = [(weights[sender], norm) for sender, norm in norms.items() if norm > 0]

    def allowance(ratio: float) -> float:
        return max(1.0, math.sqrt(ratio), 1 / ratio if adds_up else 0.0)

    def factor(weight: float, norm: float) -> float:
        if norm == 0:
            return 1.0
        typical = statistics.median_low(other * allowance(samples / weight) for samples, other in known)
        return min(1.0, CLIP_AT * typical / norm) ** 2

    return {sender: factor(weights[sender], norm) for sender, norm in norms.items()}


def largest_squared_norm(norm: float, num_values: int, codec: Codec) -> float:
    """The most that a part of a contribution of this norm can have after it was encoded and decoded."""
    largest = norm * (1 + codec.growth) + math.sqrt(num_values) * codec.floor
    return largest * largest * ROUNDING + NOTHING  # a product becomes infinite, a power would raise
