"""Whole numbers from -7 to 7, two in a byte, and a scale per 64 values: 0.53 bytes per value."""

from __future__ import annotations

import torch

from collab_core.averaging.codecs.codec import Codec, is_finite
from collab_core.averaging.codecs.groups import divided, num_rows, pack_scales, rows_of, unpack_scales

GROUP = 64
LEVELS = 7
ZERO = 8  # how a zero is written


class Int4Codec(Codec):
    """A value is off by at most half a level: 1/14 of the largest one in its group."""

    name = "int4"
    is_lossless = False
    feedback_decay = 1.0
    # every value of a group off by half a level; scales are rounded up by less than 2**-7
    growth = GROUP**0.5 / 2 / LEVELS * (1 + 2.0**-7)
    floor = 0.0

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        if not is_finite(values):
            payload[:] = b"\xff" * len(payload)  # decodes to NaN
            return False
        rows = rows_of(values, GROUP)
        packed = pack_scales(rows.abs().amax(1) / LEVELS, most=ZERO)
        levels = divided(rows, unpack_scales(packed)).round_().clamp_(-LEVELS, LEVELS)
        numbers = (levels + ZERO).to(torch.uint8).view(-1, 2)
        scales, pairs = self._split(payload, len(values))
        scales.copy_(packed)
        pairs.copy_(numbers[:, 0] | (numbers[:, 1] << 4))
        self.decode(payload, decoded)
        return True

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        packed, pairs = self._split(payload, len(decoded))
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1, GROUP).to(torch.float32)
        rows = (numbers - ZERO) * unpack_scales(packed).unsqueeze(1)
        decoded.copy_(rows.view(-1)[: len(decoded)])

    def _split(self, payload: bytearray, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = num_rows(num_values, GROUP)
        scales = torch.frombuffer(payload, dtype=torch.int16, count=count)
        return scales, torch.frombuffer(payload, dtype=torch.uint8, offset=2 * count, count=count * GROUP // 2)

    def encoded_bytes(self, num_values: int) -> int:
        return num_rows(num_values, GROUP) * (2 + GROUP // 2)
