"""Stochastic gradient descent, with momentum if the run asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collab_core.run.settings import OptimizerSettings
from collab_core.update.exact import float32
from collab_core.update.segments import Segment, cut_into_pieces


class Sgd:
    """The rule behind `optimizer.name = "sgd"`; weight decay applies to the parameters themselves, as in AdamW."""

    def __init__(self, settings: OptimizerSettings, segments: Sequence[Segment]) -> None:
        self.state_names: tuple[str, ...] = ("momentum",) if settings.momentum > 0 else ()
        self._momentum = float32(settings.momentum)
        self._looks_ahead = settings.nesterov
        self._weight_decay = settings.weight_decay
        self._pieces = cut_into_pieces(segments)

    def apply(
        self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, epoch: int, scratch: Tensor
    ) -> None:
        """Step in place; `gradient` may be overwritten."""
        kept = float32(1.0 - lr * self._weight_decay)
        for piece in self._pieces:
            here = slice(piece.start, piece.stop)
            values, velocity = params[here], gradient[here]
            if piece.decays:
                values.mul_(kept)
            if self.state_names:
                momentum = state["momentum"][here]
                momentum.mul_(self._momentum)
                momentum.add_(velocity)
                if self._looks_ahead:
                    velocity.add_(torch.mul(momentum, self._momentum, out=scratch[: piece.stop - piece.start]))
                else:
                    velocity = momentum
            values.sub_(torch.mul(velocity, float32(lr), out=scratch[: piece.stop - piece.start]))
