"""The only arithmetic the update may use: its result is the same, bit for bit, on every CPU.

IEEE 754 fixes the result of one + − × ÷ √ to the last bit. Everything built from separate ones, in a fixed order, is
therefore the same everywhere; anything fused, reordered or taken from a mathematics library is not. So, on float32
tensors on the CPU, the update uses these and nothing else:

- `mul`, `div`, `add`, `sub`, elementwise and one at a time. Never `add(alpha=)`, `lerp`, `addcmul` (fused on some
  instruction sets), `sum`, `norm` (their order follows threads and vector width), `pow`, `torch.optim`.
- `square_root` below instead of `torch.sqrt`, which hands float32 to Intel's MKL where there is one, and MKL rounds
  the last bit wrongly for one value in six (torch 2.13); other builds and other processors round correctly.
- `square_sum` and `norm` below, a fixed tree of elementwise additions.
- scalars that went through `float32` first, so that no backend has anything left to round.
- Python floats for schedules: IEEE doubles, one operation at a time, without the C library's pow, exp and cos.

Denormals count: a process that flushes them to zero computes something else. Torch keeps them unless
`torch.set_flush_denormal(True)` was called, but a library built with -ffast-math may turn flushing on just by being
loaded; `keeps_denormals` finds out.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**18
"""Elements handled at a time, small enough for the cache. It also shapes the tree of `square_sum`, so it is part of the
arithmetic: changing it changes every model's bits."""

PI = 3.141592653589793
LARGEST = 3.4028234663852886e38  # of the finite float32


def new_scratch() -> Tensor:
    """Room for one block, to be passed to the functions that need it."""
    return torch.zeros(BLOCK, dtype=torch.float32)


def float32(value: float) -> float:
    """Round to the nearest float32: it loses nothing when it meets a float32 tensor. Finite values stay finite."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(LARGEST, value)
    return rounded


def square_root(x: Tensor, out: Tensor) -> Tensor:
    """Correctly rounded √x into `out`: numpy uses the processor's own instruction, torch on x86 does not."""
    np.sqrt(x.numpy(), out=out.numpy())
    return out


def square_sum(x: Tensor, scratch: Tensor) -> float:
    """The sum of x², by a tree that depends on nothing but the length.

    Squares are folded in halves within each block, then the blocks' sums are folded the same way. A sum too large for
    float32 is inf.
    """
    starts = range(0, x.numel(), BLOCK)
    sums = torch.zeros(max(1, len(starts)), dtype=torch.float32)
    for index, start in enumerate(starts):
        part = x[start : start + BLOCK]
        squares = torch.mul(part, part, out=scratch[: part.numel()])
        _fold(squares)
        sums[index] = squares[0]
    _fold(sums)
    return float(sums[0])


def norm(x: Tensor, scratch: Tensor) -> float:
    """The Euclidean norm, a float32; inf or nan if an element is not finite or the squares are too large."""
    return float32(math.sqrt(square_sum(x, scratch)))  # √ of a double is exact to the last bit too: not a libm function


def _fold(values: Tensor) -> None:
    """Add the upper half to the lower until the sum of all stands in the first element; overwrites the others.

    The halves are cut at a power of two, as if the vector were padded with zeros up to the next one (or any later one).
    """
    size = values.numel()
    while size > 1:
        half = 1 << ((size - 1).bit_length() - 1)
        values[: size - half].add_(values[half:size])
        size = half


def power(base: float, n: int) -> float:
    """base to the n-th, n ≥ 0, by repeated squaring."""
    assert n >= 0
    result = 1.0
    while n:
        if n & 1:
            result = result * base
        base = base * base
        n >>= 1
    return result


def cosine(x: float) -> float:
    """cos(πx) for x in [0, 1]: from 1 down to −1. The Taylor series of sin(π(½ − x)) up to the 21st power."""
    assert 0 <= x <= 1
    angle = PI * (0.5 - x)
    square = angle * angle
    series = 1.0
    for k in (20, 18, 16, 14, 12, 10, 8, 6, 4, 2):
        series = 1.0 - series * square / (k * (k + 1))
    return angle * series


def keeps_denormals(scratch: Tensor) -> bool:
    """Whether arithmetic on this thread and on torch's worker threads leaves denormals alone; overwrites `scratch`."""
    as_integers = scratch.view(torch.int32)  # flushing cannot hide in the comparison
    as_integers.fill_(1)  # the smallest denormal
    scratch.mul_(1.0)
    return bool((as_integers == 1).all())
