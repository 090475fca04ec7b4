"""What a trainer does between two rounds, and what it brings to the next: gradients, or the way it went by itself."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Protocol

import torch

from collab_core.errors import Code, TaskError
from collab_core.run.settings import OptimizerSettings, RunSettings
from collab_core.state.layout import Fragment, Layout, floating_buffers
from collab_core.update.schedule import learning_rate
from collab_trainer.lamb import Lamb

BESIDE = "decay_beside_the_step"


class Work(Protocol):
    """One way to work on a model of our own."""

    goes_on: bool
    """Whether what was done stays when no round took it: then the next one does."""

    def start_at(self, values: torch.Tensor) -> None:
        """Begin at a state that all have."""

    def begin(self, epoch: int) -> None:
        """A new epoch."""

    def took(self, loss: torch.Tensor, num_samples: int, step_samples: int) -> None:
        """A forward pass gave this mean loss of so many samples; a step has so many in all its passes."""

    def drop_step(self) -> bool:
        """A pass broke off, so this step begins again. Whether the steps before it are lost too."""

    def end_step(self) -> None:
        """All passes of a step are done."""

    def collect(self, piece: Fragment, start: torch.Tensor, num_samples: int, out: torch.Tensor) -> None:
        """Write the contribution: what the update needs of the parameters, then how far the buffers moved.

        Constants among the buffers did not move at all, so no codec changes them.

        Args:
            piece: what the round is about.
            start: the state that all have, all of it.
            num_samples: in all passes together.
            out: the contribution, as long as the piece.
        """

    def accept(self, piece: Fragment, values: torch.Tensor) -> bool:
        """Take over what a round made of a piece; `values` is the state that all have now, all of it.

        Whether nothing is left of what was done while the round was under way.
        """

    def rebase(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Rounds went by without us, from one state that all had to another: go on there with what we have done."""


class Gradients:
    """The mean gradient at the run's state: what `allreduce` averages."""

    goes_on = False

    def __init__(self, model: torch.nn.Module, layout: Layout) -> None:
        self._model, self._layout = model, layout

    def start_at(self, values: torch.Tensor) -> None:
        self._layout.write(self._model, values)

    def begin(self, epoch: int) -> None:
        self._model.zero_grad(set_to_none=True)

    def took(self, loss: torch.Tensor, num_samples: int, step_samples: int) -> None:
        (loss * num_samples).backward()  # type: ignore[no-untyped-call]

    def drop_step(self) -> bool:
        """Some layers have the gradient of the pass that broke off, others not: nobody can take it out again."""
        self._model.zero_grad(set_to_none=True)
        return True

    def end_step(self) -> None:
        """Gradients add up until they are collected."""

    @torch.no_grad()
    def collect(self, piece: Fragment, start: torch.Tensor, num_samples: int, out: torch.Tensor) -> None:
        out.zero_()
        gradients = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        _write(self._layout, piece, {**gradients, **floating_buffers(self._model)}, out)
        out[: piece.num_params] /= num_samples
        out[piece.num_params :] -= start[piece.start + piece.num_params : piece.stop]

    def accept(self, piece: Fragment, values: torch.Tensor) -> bool:
        """The next epoch starts at what all have anyway."""
        return True

    def rebase(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Gradients of a model that nobody has any more are worth nothing."""
        self.start_at(new)


class LocalSteps:
    """Steps of an optimizer of our own, from the run's state on: what `diloco` averages is how far they led.

    The optimizer's memory stays here and outlives the rounds. Where a round changed what all have, our own model goes
    there too: all the way if we waited for the round, a part of it if we went on meanwhile.
    """

    goes_on = True

    def __init__(self, model: torch.nn.Module, layout: Layout, settings: OptimizerSettings, kept: float = 0.0) -> None:
        """
        Args:
            model: our own.
            layout: of the vector.
            settings: of our own steps.
            kept: how much of our own stays where a round changed what all have.
        """
        self._model, self._layout, self._settings, self._kept = model, layout, settings, kept
        self._optimizer = _local_optimizer(model, settings)

    def start_at(self, values: torch.Tensor) -> None:
        self._layout.write(self._model, values)

    def begin(self, epoch: int) -> None:
        self._model.zero_grad(set_to_none=True)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._settings, epoch)

    def took(self, loss: torch.Tensor, num_samples: int, step_samples: int) -> None:
        (loss * (num_samples / step_samples)).backward()  # type: ignore[no-untyped-call]

    def drop_step(self) -> bool:
        self._optimizer.zero_grad(set_to_none=True)
        return False

    def end_step(self) -> None:
        if self._settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_norm)
        self._decay()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _decay(self) -> None:
        """As AdamW does, where torch would add it to the gradient, so that momentum makes ten times as much of it."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if group.get(BESIDE) else ():
                parameter.mul_(1 - group["lr"] * group[BESIDE])

    @torch.no_grad()
    def collect(self, piece: Fragment, start: torch.Tensor, num_samples: int, out: torch.Tensor) -> None:
        _write(self._layout, piece, self._values(), out)
        out -= start[piece.start : piece.stop]
        out[: piece.num_params].neg_()

    @torch.no_grad()
    def accept(self, piece: Fragment, values: torch.Tensor) -> bool:
        own, shared = self._values(), self._layout.views(values)
        for name in piece.names:
            if self._kept:
                own[name].lerp_(shared[name].to(own[name]), 1 - self._kept)
            else:
                own[name].copy_(shared[name])
        return not self._kept and len(piece.names) == len(own)

    @torch.no_grad()
    def rebase(self, old: torch.Tensor, new: torch.Tensor) -> None:
        before, after = self._layout.views(old), self._layout.views(new)
        for name, own in self._values().items():
            own.add_((after[name] - before[name]).to(own))

    def _values(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **floating_buffers(self._model)}


def work_of(settings: RunSettings, model: torch.nn.Module, layout: Layout) -> Work:
    """How a run's trainers work."""
    if settings.strategy.name == "diloco":
        kept = settings.outer.mix if settings.strategy.overlap_steps else 0.0
        return LocalSteps(model, layout, settings.optimizer, kept)
    return Gradients(model, layout)


def _write(layout: Layout, piece: Fragment, values: Mapping[str, torch.Tensor | None], out: torch.Tensor) -> None:
    shapes = dict(layout.params + layout.buffers)
    start = 0
    for name in piece.names:
        size = math.prod(shapes[name])
        if (value := values.get(name)) is not None:
            out[start : start + size].view(shapes[name]).copy_(value)
        start += size


def _local_optimizer(model: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.name == "sgd":
        groups = [{"params": group["params"], BESIDE: group["weight_decay"]} for group in groups]
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    betas, device = (settings.beta1, settings.beta2), trained[0].device
    if settings.name == "lamb":
        scaled, plain = groups
        return Lamb([{**scaled, "is_scaled": True}, plain], lr=settings.lr, betas=betas, eps=settings.eps)
    if settings.name == "adamw8bit":
        return _adamw_of_8_bits(device)(groups, lr=settings.lr, betas=betas, eps=settings.eps)
    # torch fuses by itself only on GPUs; on a CPU a small model's step takes a third of the time
    fused = True if device.type == "cpu" else None
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=fused)


def _adamw_of_8_bits(device: torch.device) -> type[torch.optim.AdamW]:
    try:
        package = importlib.import_module("bitsandbytes")
    except ImportError:
        what, fix = "the package bitsandbytes is not installed here", "Install it: pip install bitsandbytes"
    else:
        if device.type == "cuda":
            return package.optim.AdamW8bit  # type: ignore[no-any-return]
        what, fix = f"it needs a CUDA device, not {device.type}", "Train on one: --device cuda"
    raise TaskError(Code.NO_OPTIMIZER, f"The run's trainers use optimizer.name = 'adamw8bit', and {what}.", fix=fix)
