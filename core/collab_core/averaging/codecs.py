"""How float32 values travel. What a codec loses stays at home and is added the next time (error feedback)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

FP16_MAX = 65504.0


class Codec(Protocol):
    """Encodes one part of a vector. Decoding the same bytes gives the same values on every machine."""

    name: str
    is_lossless: bool

    def encode(self, values: torch.Tensor) -> bytes: ...

    def decode(self, payload: bytes) -> torch.Tensor: ...

    def encoded_bytes(self, num_values: int) -> int: ...


class NoCodec:
    """The values as they are."""

    name = "none"
    is_lossless = True

    def encode(self, values: torch.Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, payload: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(payload, dtype=np.float32).copy())

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values


class Fp16Codec:
    """Half precision. Values too large for it are cut to its range; the rest of them stays in the error feedback."""

    name = "fp16"
    is_lossless = False

    def encode(self, values: torch.Tensor) -> bytes:
        return values.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).numpy().tobytes()

    def decode(self, payload: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(payload, dtype=np.float16).astype(np.float32))

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * num_values


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoCodec(), Fp16Codec())}
