"""Half precision: 2 bytes per value."""

from __future__ import annotations

import torch

from collab_core.averaging.codecs.codec import Codec, is_finite

FP16_MAX = 65504.0


class Fp16Codec(Codec):
    """Values too large for half precision are cut to its range; the rest of them stays in the error feedback."""

    name = "fp16"
    is_lossless = False
    feedback_decay = 1.0
    growth = 2.0**-11  # half a unit in the last place
    floor = 2.0**-25  # the same where numbers are denormal

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
