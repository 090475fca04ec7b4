"""LAMB for steps of one's own, on any device; the replicated update has another one, which is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Adam's direction, in each tensor as long as that tensor says (You et al., 2020).

    Args:
        groups: of parameters, each with `weight_decay`; with `is_scaled` their steps are scaled to their own norms.
        lr: relative to those norms.
        betas: how much of the running means is kept.
        eps: added to the divisor.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "is_scaled": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean = state["mean"] / (1 - beta1 ** state["step"])
        square = state["square"] / (1 - beta2 ** state["step"])
        direction = mean / (square.sqrt_() + group["eps"]) + group["weight_decay"] * parameter
        if group["is_scaled"]:  # biases and norms are not: one that begins at zero would hardly ever move
            length, own = direction.norm(), parameter.norm()
            direction *= torch.where((length > 0) & (own > 0), own / length, torch.ones_like(own))
        parameter.sub_(direction, alpha=group["lr"])
