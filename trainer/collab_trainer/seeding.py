"""Initial parameters that are the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

StdOf = Callable[[str, torch.nn.Parameter], float]


def std_by_fan_in(name: str, parameter: torch.nn.Parameter) -> float:
    """1/√n for a unit that sums n inputs, so that values neither grow nor shrink from layer to layer."""
    return 1 / math.sqrt(parameter.numel() // len(parameter))


def draw(bits: np.random.PCG64, count: int, std: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Uniform values with this standard deviation.

    `torch.randn` differs between instruction sets. Here integers from PCG64, whose stream numpy guarantees, become
    float32 without rounding and are multiplied once by a constant.
    """
    integers = (bits.random_raw(count) >> np.uint64(40)).astype(np.int32) - 2**23
    values: np.ndarray[Any, np.dtype[np.float32]] = integers.astype(np.float32)
    values *= np.float32(std * math.sqrt(3) / 2**23)
    return values


def fill_parameters(model: torch.nn.Module, *, seed: int, std_of: StdOf = std_by_fan_in) -> None:
    """Initialise a model: biases with 0, other vectors (the scales of norms) with 1, the rest at random.

    Tied parameters appear once, under their first name, and stay tied.

    Args:
        model: filled in place, in the order of its parameters' names.
        seed: of the run.
        std_of: the standard deviation of a parameter with two dimensions or more, given its name and itself. Compute it
            with `math.sqrt`, not `**`, whose last bit differs between machines.
    """
    bits = np.random.PCG64(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            continue  # only sizes are asked for
        if parameter.dim() < 2:
            values = np.full(parameter.shape, 0 if name.endswith("bias") else 1, dtype=np.float32)
        else:
            values = draw(bits, parameter.numel(), std_of(name, parameter))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
