"""LAMB: Adam's direction, scaled per tensor to the tensor's own size, for large batches (You et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from collab_core.run.settings import OptimizerSettings
from collab_core.update.exact import float32, norm
from collab_core.update.moments import Moments
from collab_core.update.segments import Segment, cut_into_pieces


class Lamb:
    """The rule behind `optimizer.name = "lamb"`."""

    def __init__(self, settings: OptimizerSettings, segments: Sequence[Segment]) -> None:
        self.state_names: tuple[str, ...] = Moments.names
        self._weight_decay = float32(settings.weight_decay)
        self._moments = Moments(settings)
        self._segments = [(segment, cut_into_pieces([segment])) for segment in segments]

    def apply(
        self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, epoch: int, scratch: Tensor
    ) -> None:
        """Step in place; `gradient` is overwritten."""
        correction, root_correction = self._moments.corrections(epoch)
        for segment, pieces in self._segments:
            for piece in pieces:
                here = slice(piece.start, piece.stop)
                step, room = gradient[here], scratch[: piece.stop - piece.start]
                exp_avg, exp_avg_sq = state["exp_avg"][here], state["exp_avg_sq"][here]
                self._moments.update(exp_avg, exp_avg_sq, step, room)
                self._moments.direction(exp_avg, exp_avg_sq, 1.0 / correction, root_correction, room, out=step)
                if piece.decays:
                    step.add_(torch.mul(params[here], self._weight_decay, out=room))
            whole = slice(segment.start, segment.stop)
            # Biases and norms take Adam's step as it is: a bias that begins at zero would hardly ever move otherwise.
            ratio = trust_ratio(norm(params[whole], scratch), norm(gradient[whole], scratch)) if segment.decays else 1.0
            for piece in pieces:
                step = gradient[piece.start : piece.stop]
                step.mul_(float32(lr * ratio))
                params[piece.start : piece.stop].sub_(step)


def trust_ratio(params_norm: float, update_norm: float) -> float:
    """How much longer the parameters are than their update; 1 where that says nothing (a zero or an overflow)."""
    ratio = params_norm / update_norm if params_norm > 0 and update_norm > 0 else 1.0
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0
