"""The values as they are: 4 bytes each."""

from __future__ import annotations

import torch

from collab_core.averaging.codecs.codec import Codec, is_finite


class NoCodec(Codec):
    """A codec that loses nothing."""

    name = "none"
    is_lossless = True
    feedback_decay = 1.0
    growth = floor = 0.0

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        torch.frombuffer(payload, dtype=torch.float32).copy_(values)
        return is_finite(decoded.copy_(values))

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        decoded.copy_(torch.frombuffer(payload, dtype=torch.float32))

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values
