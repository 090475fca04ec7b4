"""The arithmetic of a meeting: both sides come to the same bits, and the swarm holds together what it held before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_VALUES = 2**18  # at once: doubles of a whole model would take twice its memory again


@dataclass(frozen=True, slots=True)
class Share:
    """What one side brings."""

    peer_id: str
    values: torch.Tensor
    """Flat float32 on the CPU, read only."""
    weight: float


def weighted_mean(one: Share, other: Share) -> torch.Tensor:
    """(n₁x₁ + n₂x₂) / (n₁ + n₂), in doubles, rounded once.

    The order is that of the peer IDs, so both sides compute the same bits, whoever asked whom. Only separate products,
    sums and quotients: they are the same on every processor.
    """
    first, second = sorted((one, other), key=lambda share: share.peer_id)
    mean = torch.empty_like(first.values)
    for start in range(0, len(mean), CHUNK_VALUES):
        part = slice(start, start + CHUNK_VALUES)
        total = first.values[part].double() * first.weight
        total += second.values[part].double() * second.weight
        mean[part] = total / (first.weight + second.weight)
    return mean


def moved(current: torch.Tensor, old: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The mean in place of the old value; what was learnt since the old value was told stays on top of it."""
    if torch.equal(current, old):
        return mean
    return current + (mean - old)
