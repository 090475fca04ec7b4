"""Looking at a model without disturbing its training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from collab_core.state.layout import Layout

if TYPE_CHECKING:
    from collab_trainer.task import Task


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[torch.device]:
    """No gradients and no dropout inside; afterwards the model is in the mode it was in. Gives the model's device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def evaluator(task: Task, model: torch.nn.Module) -> Callable[[Mapping[str, torch.Tensor]], float]:
    """Measures the held-out loss of a run's state, in a model that nothing else uses."""
    load = _loader(model)

    def evaluate(tensors: Mapping[str, torch.Tensor]) -> float:
        load(tensors)
        return task.evaluate(model)

    return evaluate


def writer(task: Task, model: torch.nn.Module) -> Callable[[Mapping[str, torch.Tensor]], str]:
    """What a run's state has to say, in a model that nothing else uses."""
    load = _loader(model)

    def write(tensors: Mapping[str, torch.Tensor]) -> str:
        load(tensors)
        return task.sample(model)

    return write


def _loader(model: torch.nn.Module) -> Callable[[Mapping[str, torch.Tensor]], None]:
    layout = Layout.of(model)

    def load(tensors: Mapping[str, torch.Tensor]) -> None:
        values = torch.empty(layout.num_values)
        for name, view in layout.views(values).items():
            view.copy_(tensors[f"model/{name}"])
        layout.write(model, values)

    return load
