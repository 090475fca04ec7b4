"""One global update: look at the gradient, clip it, apply the run's rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from collab_core.run.settings import OptimizerSettings
from collab_core.update.adamw import AdamW
from collab_core.update.exact import float32, keeps_denormals, new_scratch, norm
from collab_core.update.lamb import Lamb
from collab_core.update.schedule import learning_rate
from collab_core.update.segments import Segment, check_segments
from collab_core.update.sgd import Sgd

__all__ = ["Optimizer", "Segment", "UpdateStats"]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one update did."""

    lr: float
    gradient_norm: float
    """Before clipping."""
    clipped: bool
    is_finite: bool
    """False: the gradient was not finite, or too large to be squared, and nothing was changed."""


class Rule(Protocol):
    """How parameters follow from a clipped gradient and the state."""

    state_names: tuple[str, ...]

    def __init__(self, settings: OptimizerSettings, segments: Sequence[Segment]) -> None: ...

    def apply(
        self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, epoch: int, scratch: Tensor
    ) -> None: ...


RULES: dict[str, type[Rule]] = {"adamw": AdamW, "lamb": Lamb, "sgd": Sgd}


class Optimizer:
    """The run's optimizer on flat float32 vectors on the CPU; keeps nothing between steps but scratch room.

    Args:
        settings: the run's `[optimizer]`.
        segments: the tensors in the order in which they lie in the vector, without gaps.
        num_params: length of the vector.
    """

    def __init__(self, settings: OptimizerSettings, segments: Sequence[Segment], num_params: int) -> None:
        check_segments(segments, num_params)
        self._settings = settings
        self._num_params = num_params
        self._rule = RULES[settings.name](settings, segments)
        self._scratch = new_scratch()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the vectors the optimizer remembers from step to step."""
        return self._rule.state_names

    def new_state(self) -> dict[str, Tensor]:
        """The state before the first update: zeros."""
        return {name: torch.zeros(self._num_params, dtype=torch.float32) for name in self.state_names}

    @torch.no_grad()
    def step(self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], epoch: int) -> UpdateStats:
        """Change `params` and `state` in place by the update that ends `epoch`, counted from 0.

        `gradient` is used as scratch room. A gradient that is not finite changes nothing: every peer sees the same
        norm, so every peer skips the same update.

        Raises:
            ValueError: a vector is not a contiguous float32 vector of `num_params` on the CPU, or state is missing.
            RuntimeError: this process flushes denormals to zero and would not get the bits the others get.
        """
        self._check(params=params, gradient=gradient, **{name: state.get(name) for name in self.state_names})
        if not keeps_denormals(self._scratch):
            raise RuntimeError("this process flushes denormals to zero, so its update would differ from other peers'")
        lr = learning_rate(self._settings, epoch)
        gradient_norm = norm(gradient, self._scratch)
        if not math.isfinite(gradient_norm):
            return UpdateStats(lr, gradient_norm, clipped=False, is_finite=False)
        should_clip = 0 < self._settings.clip_norm < gradient_norm
        if should_clip:
            gradient.mul_(float32(self._settings.clip_norm / gradient_norm))
        self._rule.apply(params, gradient, state, lr, epoch, self._scratch)
        return UpdateStats(lr, gradient_norm, clipped=should_clip, is_finite=True)

    def _check(self, **vectors: Tensor | None) -> None:
        for name, vector in vectors.items():
            if vector is None:
                raise ValueError(f"the state has no {name!r}; {self._settings.name} needs {self.state_names}")
            is_flat = vector.shape == (self._num_params,) and vector.is_contiguous()
            if not is_flat or vector.dtype != torch.float32 or vector.device.type != "cpu":
                seen = f"{tuple(vector.shape)} {vector.dtype} on {vector.device}"
                raise ValueError(f"{name} must be a contiguous float32 vector of {self._num_params} on cpu, got {seen}")
