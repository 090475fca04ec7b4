"""What a codec is, and how it is known that values are finite."""

from __future__ import annotations

import math
from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes one part of a vector. Decoding the same bytes gives the same values on every machine.

    So decoding is only what IEEE arithmetic defines: copies, shifts, one rounding per value.
    """

    name: str
    is_lossless: bool
    feedback_decay: float
    """How much of what was lost is kept for the next round: 1 is all of it."""
    growth: float
    """The norm of what is decoded exceeds that of the values by at most this part of it, …"""
    floor: float
    """… and this for every value: times the root of their number, as errors of all values add up like that."""

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        """Fill a payload of the right size; what it decodes to is written into `decoded`. False: it is not finite."""

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        """Write the values of a payload of the right size into `decoded`; nonsense becomes NaN."""

    def encoded_bytes(self, num_values: int) -> int:
        """Size of a payload."""

    @property
    def for_averages(self) -> Codec:
        """What averages of the values travel in."""
        return self


def largest(values: torch.Tensor) -> float:
    """A bound on the largest magnitude; infinite or NaN if one of the values is.

    The norm is one quick pass and bounds every value. Only where it overflows is each value looked at.
    """
    bound = math.sqrt(float(torch.dot(values, values)))
    if math.isfinite(bound):
        return bound
    return float(values.abs().max())


def is_finite(values: torch.Tensor) -> bool:
    return math.isfinite(largest(values))
