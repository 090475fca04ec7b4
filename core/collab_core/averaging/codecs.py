"""How float32 values travel. What a codec loses stays at home and is added the next time (error feedback)."""

from __future__ import annotations

import math
from typing import Protocol

import torch

FP16_MAX = 65504.0


class Codec(Protocol):
    """Encodes one part of a vector. Decoding the same bytes gives the same values on every machine."""

    name: str
    is_lossless: bool

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        """Fill a payload of the right size; what it decodes to is written into `decoded`. False: it is not finite."""

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        """Write the values of a payload of the right size into `decoded`."""

    def encoded_bytes(self, num_values: int) -> int:
        """Size of a payload."""


class NoCodec:
    """The values as they are."""

    name = "none"
    is_lossless = True

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        torch.frombuffer(payload, dtype=torch.float32).copy_(values)
        return is_finite(decoded.copy_(values))

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        decoded.copy_(torch.frombuffer(payload, dtype=torch.float32))

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values


class Fp16Codec:
    """Half precision. Values too large for it are cut to its range; the rest of them stays in the error feedback."""

    name = "fp16"
    is_lossless = False

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        half = torch.frombuffer(payload, dtype=torch.float16).copy_(values)
        if is_finite(decoded.copy_(half)):
            return True
        decoded.copy_(half.copy_(values.clamp(-FP16_MAX, FP16_MAX)))
        return is_finite(values)

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        decoded.copy_(torch.frombuffer(payload, dtype=torch.float16))

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * num_values


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


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoCodec(), Fp16Codec())}
