"""Running means of the gradient and of its square: what AdamW and LAMB have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from collab_core.errors import Code, ConfigError
from collab_core.run.settings import OptimizerSettings
from collab_core.update.exact import float32, power, square_root


class Moments:
    """Adam's two moments and the direction they give."""

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._beta1, self._rest1 = float32(settings.beta1), float32(1.0 - settings.beta1)
        self._beta2, self._rest2 = float32(settings.beta2), float32(1.0 - settings.beta2)
        self._eps = float32(settings.eps)
        if self._eps == 0:
            message = f"optimizer.eps = {settings.eps} is 0 in float32, so the update would divide by zero."
            raise ConfigError(Code.BAD_VALUE, message, fix="Use 1e-30 or more; 1e-8 is usual.")

    def corrections(self, epoch: int) -> tuple[float, float]:
        """By what to divide `exp_avg` and √`exp_avg_sq`, which started at zero, after the update of `epoch`."""
        num_updates = epoch + 1
        first = 1.0 - power(self._settings.beta1, num_updates)
        second = 1.0 - power(self._settings.beta2, num_updates)
        return first, math.sqrt(second)

    def update(self, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, scratch: Tensor) -> None:
        """Let both moments take in the gradient."""
        torch.mul(gradient, self._rest1, out=scratch)
        exp_avg.mul_(self._beta1)
        exp_avg.add_(scratch)
        torch.mul(gradient, gradient, out=scratch)
        scratch.mul_(self._rest2)
        exp_avg_sq.mul_(self._beta2)
        exp_avg_sq.add_(scratch)

    def direction(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, scale: float, root_correction: float, scratch: Tensor, out: Tensor
    ) -> None:
        """Write scale × exp_avg / (√exp_avg_sq / root_correction + ε) into `out`."""
        square_root(exp_avg_sq, out=scratch)
        scratch.div_(float32(root_correction))
        scratch.add_(self._eps)
        torch.mul(exp_avg, float32(scale), out=out)
        out.div_(scratch)
