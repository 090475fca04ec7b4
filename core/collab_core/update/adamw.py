"""AdamW: Adam with weight decay applied to the parameters themselves (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from collab_core.run.settings import OptimizerSettings
from collab_core.update.exact import float32
from collab_core.update.moments import Moments
from collab_core.update.segments import Segment, cut_into_pieces


class AdamW:
    """The rule behind `optimizer.name = "adamw"`."""

    def __init__(self, settings: OptimizerSettings, segments: Sequence[Segment]) -> None:
        self.state_names: tuple[str, ...] = Moments.names
        self._weight_decay = settings.weight_decay
        self._moments = Moments(settings)
        self._pieces = cut_into_pieces(segments)

    def apply(
        self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, epoch: int, scratch: Tensor
    ) -> None:
        """Step in place; `gradient` is overwritten."""
        correction, root_correction = self._moments.corrections(epoch)
        kept = float32(1.0 - lr * self._weight_decay)
        for piece in self._pieces:
            here = slice(piece.start, piece.stop)
            values, step, room = params[here], gradient[here], scratch[: piece.stop - piece.start]
            exp_avg, exp_avg_sq = state["exp_avg"][here], state["exp_avg_sq"][here]
            if piece.decays:
                values.mul_(kept)
            self._moments.update(exp_avg, exp_avg_sq, step, room)
            self._moments.direction(exp_avg, exp_avg_sq, lr / correction, root_correction, room, out=step)
            values.sub_(step)
