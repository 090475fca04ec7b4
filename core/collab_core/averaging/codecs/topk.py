"""Of each 4096 values the 64 largest: where they are, their signs, and whether they are rather large or rather small.

116 bytes instead of 16384. Almost everything stays in the error feedback, so that fades: what was not worth sending for
many rounds is out of date. Everyone chooses other values, so in an average four times as many are worth sending.
"""

from __future__ import annotations

import torch

from collab_core.averaging.codecs.codec import is_finite
from collab_core.averaging.codecs.groups import num_rows, pack_scales, rows_of, unpack_scales

CHUNK = 4096
KEPT, KEPT_OF_AVERAGES = 64, 256
SCALE_BYTES = 4
SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


class TopKCodec:
    """Positions take 12 bits, in rising order; values take two: the sign, and which of the chunk's two magnitudes.

    Args:
        kept: how many values of each chunk travel, a multiple of 4.
    """

    name = "topk"
    is_lossless = False
    feedback_decay = 0.95
    growth = 2.0**-7  # a mean of magnitudes is not more than they were, but scales are rounded up
    floor = 0.0

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._values_at = SCALE_BYTES + kept * 12 // 8
        self._row_bytes = self._values_at + kept * 2 // 8

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        if not is_finite(values):
            payload[:] = b"\xff" * len(payload)  # decodes to NaN
            return False
        rows = rows_of(values, CHUNK)
        positions = rows.abs().topk(self._kept, sorted=False).indices.sort().values
        kept = rows.gather(1, positions)
        magnitudes = kept.abs().double()  # the sum of the largest numbers there are is finite too
        is_large = magnitudes >= magnitudes.mean(1, keepdim=True)
        large = _mean_where(magnitudes, is_large)
        small = _mean_where(magnitudes, ~is_large)

        content = torch.frombuffer(payload, dtype=torch.uint8).view(-1, self._row_bytes)
        scales = pack_scales(torch.stack((small, large), dim=1).float(), most=1)
        content[:, :SCALE_BYTES] = scales.view(torch.uint8)
        content[:, SCALE_BYTES : self._values_at] = _pack_positions(positions)
        codes = (kept < 0).to(torch.uint8) | (is_large.to(torch.uint8) << 1)
        content[:, self._values_at :] = (codes.view(len(rows), -1, 4) << SHIFTS).sum(2, dtype=torch.uint8)
        self.decode(payload, decoded)
        return True

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        content = torch.frombuffer(payload, dtype=torch.uint8).view(-1, self._row_bytes)
        positions = _unpack_positions(content[:, SCALE_BYTES : self._values_at])
        if not bool((positions[:, 1:] > positions[:, :-1]).all()):  # one position twice: which value counts is chance
            decoded.fill_(torch.nan)
            return
        scales = unpack_scales(content[:, :SCALE_BYTES].contiguous().view(torch.int16))
        codes = ((content[:, self._values_at :].unsqueeze(2) >> SHIFTS) & 3).view(-1, self._kept).to(torch.int64)
        magnitudes = scales.gather(1, codes >> 1)
        rows = torch.zeros(len(content), CHUNK)
        rows.scatter_(1, positions, torch.where((codes & 1).bool(), -magnitudes, magnitudes))
        decoded.copy_(rows.view(-1)[: len(decoded)])

    def encoded_bytes(self, num_values: int) -> int:
        return num_rows(num_values, CHUNK) * self._row_bytes


def _mean_where(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _pack_positions(positions: torch.Tensor) -> torch.Tensor:
    """Two positions in three bytes."""
    first, second = positions[:, 0::2], positions[:, 1::2]
    three = torch.stack((first & 255, (first >> 8) | ((second & 15) << 4), second >> 4), dim=2)
    return three.to(torch.uint8).view(len(positions), -1)


def _unpack_positions(packed: torch.Tensor) -> torch.Tensor:
    low, middle, high = packed.reshape(len(packed), -1, 3).to(torch.int64).unbind(2)
    return torch.stack((low | ((middle & 15) << 8), (middle >> 4) | (high << 4)), dim=2).view(len(packed), -1)
