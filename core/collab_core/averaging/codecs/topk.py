"""Of each 4096 values the largest: where they are, their signs, and how large they are, in two steps or four.

What is not sent stays in the error feedback, so that fades: what was not worth sending for many rounds is out of date.
Everyone chooses other values, so in an average four times as many are worth sending.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from collab_core.averaging.codecs.codec import Codec, is_finite
from collab_core.averaging.codecs.groups import num_rows, pack_scales, rows_of, unpack_scales

CHUNK = 4096
MAX_KEPT = CHUNK // 2

Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class TopKCodec(Codec):
    """Scales, the positions, and for each value its sign and which of the chunk's magnitudes it has.

    Measured on small models: of the bits one may spend, those that name more values are worth most. Once half of them
    are sent, finer steps are: four magnitudes instead of two.

    Args:
        kept: how many values of each chunk travel: a power of two, from 8 to half of them.
    """

    name = "topk"
    is_lossless = False
    feedback_decay = 0.95
    growth = 2.0**-7  # a mean of magnitudes is not more than they were, but scales are rounded up
    floor = 0.0

    def __init__(self, kept: int = MAX_KEPT) -> None:
        self._kept = kept
        self._halvings = 2 if kept == MAX_KEPT else 1
        self._scale_bytes = 2 << self._halvings
        self._positions = _Positions(kept)
        self._values_at = self._scale_bytes + self._positions.num_bytes
        self._row_bytes = self._values_at + kept * (1 + self._halvings) // 8

    @functools.cached_property
    def for_averages(self) -> TopKCodec:
        return TopKCodec(min(4 * self._kept, MAX_KEPT))

    def encode(self, values: torch.Tensor, payload: bytearray, decoded: torch.Tensor) -> bool:
        if not is_finite(values):
            payload[:] = b"\xff" * len(payload)  # decodes to NaN
            return False
        rows = rows_of(values, CHUNK)
        mask = torch.zeros(rows.shape, dtype=torch.bool)
        mask.scatter_(1, rows.abs().topk(self._kept, sorted=False).indices, True)
        kept = rows[mask].view(len(rows), -1)
        magnitudes = kept.abs().double()  # the sum of the largest numbers there are is finite too
        levels, means = _by_size(magnitudes, self._halvings)

        content = np.frombuffer(payload, np.uint8).reshape(-1, self._row_bytes)
        scales = pack_scales(means.float(), most=1)
        content[:, : self._scale_bytes] = scales.view(torch.uint8).numpy()
        content[:, self._scale_bytes : self._values_at] = self._positions.pack(mask.numpy())
        is_upper = [(levels >> bit & 1).bool() for bit in range(self._halvings)]
        codes = torch.stack((kept < 0, *is_upper), dim=2)
        content[:, self._values_at :] = _pack_bits(codes.view(len(rows), -1).numpy())
        self.decode(payload, decoded)
        return True

    def decode(self, payload: bytearray, decoded: torch.Tensor) -> None:
        content = np.frombuffer(payload, np.uint8).reshape(-1, self._row_bytes)
        mask = self._positions.unpack(content[:, self._scale_bytes : self._values_at])
        if mask is None:
            decoded.fill_(torch.nan)
            return
        packed = torch.from_numpy(content[:, : self._scale_bytes].copy()).view(torch.int16)
        bits = torch.from_numpy(_unpack_bits(content[:, self._values_at :])).view(len(content), self._kept, -1)
        levels = sum((bits[:, :, 1 + bit].long() << bit for bit in range(self._halvings)), torch.tensor(0))
        magnitudes = unpack_scales(packed).gather(1, levels)
        rows = torch.zeros(len(content), CHUNK)
        rows[torch.from_numpy(mask)] = torch.where(bits[:, :, 0].bool(), -magnitudes, magnitudes).view(-1)
        decoded.copy_(rows.view(-1)[: len(decoded)])

    def encoded_bytes(self, num_values: int) -> int:
        return num_rows(num_values, CHUNK) * self._row_bytes


class _Positions:
    """Where the kept values of a chunk are. If they are half of all, one bit for each place says it.

    If they are fewer, their lowest bits are written as they are. What is left of them rises slowly: it is counted up,
    a 0 for one more and a 1 for a value (Elias and Fano; two bits more than the lowest ones, each).
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._low_bits = 0 if kept == MAX_KEPT else int(math.log2(CHUNK // kept))
        self._high_size = CHUNK if kept == MAX_KEPT else 2 * kept
        self._low_bytes = kept * self._low_bits // 8
        self.num_bytes = self._low_bytes + self._high_size // 8

    def pack(self, mask: Bits) -> Bits:
        if not self._low_bits:
            return _pack_bits(mask)
        positions = np.nonzero(mask)[1].reshape(-1, self._kept)
        low = (positions[:, :, None] >> np.arange(self._low_bits) & 1).astype(np.uint8)
        high = np.zeros((len(mask), self._high_size), np.uint8)
        np.put_along_axis(high, (positions >> self._low_bits) + np.arange(self._kept), 1, axis=1)
        return np.concatenate((_pack_bits(low.reshape(len(mask), -1)), _pack_bits(high)), axis=1)

    def unpack(self, packed: Bits) -> Bits | None:
        """None: nobody packed this."""
        high = _unpack_bits(packed[:, self._low_bytes :])
        if (high.sum(1, dtype=np.int64) != self._kept).any():
            return None
        if not self._low_bits:
            return high.astype(bool)
        bits = _unpack_bits(packed[:, : self._low_bytes]).reshape(len(packed), self._kept, self._low_bits)
        low = (bits.astype(np.int64) << np.arange(self._low_bits)).sum(2)
        counted = np.nonzero(high)[1].reshape(-1, self._kept) - np.arange(self._kept)
        positions = (counted << self._low_bits) + low
        is_rising = (positions[:, 1:] > positions[:, :-1]).all()  # one position twice: which value counts is chance
        if not is_rising or (positions >= CHUNK).any():
            return None
        mask = np.zeros((len(packed), CHUNK), bool)
        np.put_along_axis(mask, positions, True, axis=1)
        return mask


def _by_size(magnitudes: torch.Tensor, num_halvings: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The level of each, from small to large, and the mean of each level: halved at the mean, and the halves again."""
    levels, means = torch.zeros_like(magnitudes, dtype=torch.int64), magnitudes.mean(1, keepdim=True)
    for _ in range(num_halvings):
        levels = 2 * levels + (magnitudes >= means.gather(1, levels))
        means = torch.stack([_mean_where(magnitudes, levels == level) for level in range(2 * means.shape[1])], dim=1)
    return levels, means


def _mean_where(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _pack_bits(bits: Bits) -> Bits:
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack_bits(packed: Bits) -> Bits:
    return np.unpackbits(packed, axis=1, bitorder="little")
