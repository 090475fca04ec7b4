"""Whole numbers from -127 to 127 and a scale per 256 values: 1.008 bytes per value."""

from __future__ import annotations

import torch

from collab_core.averaging.codecs.codec import Codec, is_finite
from collab_core.averaging.codecs.groups import divided, num_rows, pack_scales, rows_of, unpack_scales

GROUP = 256
LEVELS = 127


class Int8Codec(Codec):
    """A value is off by at most half a level: 1/254 of the largest one in its group."""

    name = "int8"
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
        packed = pack_scales(rows.abs().amax(1) / LEVELS, most=LEVELS)
        levels = divided(rows, unpack_scales(packed)).round_().clamp_(-LEVELS, LEVELS)
        scales, numbers = self._split(payload, len(values))
        scales.copy_(packed)
        numbers.copy_(levels.view(-1)[: len(values)])
        self.decode(payload, decoded)
        return True

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        packed, numbers = self._split(payload, len(decoded))
        rows = rows_of(numbers.to(torch.float32), GROUP) * unpack_scales(packed).unsqueeze(1)
        decoded.copy_(rows.view(-1)[: len(decoded)])

    def _split(self, payload: bytearray, num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = num_rows(num_values, GROUP)
        scales = torch.frombuffer(payload, dtype=torch.int16, count=count)
        return scales, torch.frombuffer(payload, dtype=torch.int8, offset=2 * count, count=num_values)

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * num_rows(num_values, GROUP) + num_values
