"""A task of somebody else's package, watched: what it raises or returns wrongly is told as its own mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from collab_trainer.blame import blaming
from collab_trainer.generating import COMPLETE, Generation
from collab_trainer.task import Batch, Blocks, Task

Kind = TypeVar("Kind")


class GuardedTask:
    """A task (see `collab_trainer.task.Task`).

    Args:
        name: `package.module:Class`, for the words.
        task: the author's.
    """

    def __init__(self, name: str, task: Task) -> None:
        self.name, self._task = name, task

    @property
    def floor(self) -> float | None:
        with blaming(self.name, "floor"):
            floor = self._task.floor
            return None if floor is None else float(floor)

    @property
    def dataset_size(self) -> int | None:
        with blaming(self.name, "dataset_size"):
            size = getattr(self._task, "dataset_size", None)
            return None if size is None else int(size)

    def build_model(self) -> torch.nn.Module:
        with blaming(self.name, "build_model()"):
            return _expect(self._task.build_model(), torch.nn.Module)

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> Blocks:
        with blaming(self.name, "blocks()"):
            return GuardedBlocks(self.name, self._task.blocks(seed=seed, position=position))

    def samples(self, block: Any) -> Batch:
        with blaming(self.name, "samples()"):
            return checked_batch(self._task.samples(block))

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with blaming(self.name, "loss()"):
            loss = _expect(self._task.loss(model, batch), torch.Tensor)
            if loss.dim():
                raise ValueError(f"it returned a tensor of the shape {tuple(loss.shape)}, not one number: use .mean()")
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise ValueError("it returned a number that does not depend on the model's parameters")
            return loss

    def evaluate(self, model: torch.nn.Module) -> float:
        with blaming(self.name, "evaluate()"):
            return float(self._task.evaluate(model))

    def sample(self, model: torch.nn.Module) -> str:
        with blaming(self.name, "sample()"):
            return _expect(self._task.sample(model), str)

    @property
    def complete(self) -> Callable[[torch.nn.Module, str, Generation], str] | None:
        """None if the author's task does not go on with a text."""
        theirs = getattr(self._task, COMPLETE, None)
        if theirs is None:
            return None

        def complete(model: torch.nn.Module, prompt: str, generation: Generation) -> str:
            with blaming(self.name, "complete()"):
                text: str = _expect(theirs(model, prompt, generation), str)
                return text

        return complete


class GuardedBlocks:
    """The blocks of such a task."""

    def __init__(self, name: str, blocks: Blocks) -> None:
        self._name, self._blocks = name, blocks

    def __next__(self) -> Any:
        with blaming(self._name, "the next of blocks()"):
            try:
                return next(self._blocks)
            except StopIteration:
                raise ValueError("the data came to an end, and blocks must go on for ever: begin again") from None

    @property
    def position(self) -> dict[str, Any]:
        with blaming(self._name, "position of blocks()"):
            position = _expect(self._blocks.position, dict)
            json.dumps(position)  # here, where the author is named if it is no JSON
            return position


def checked_batch(batch: Batch) -> Batch:
    """A batch that can be cut into rows, or a ValueError or TypeError that says why not."""
    lengths = {}
    for name, rows in _expect(batch, dict).items():
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(rows).__name__}, not a tensor")
        if rows.dim() == 0:
            raise ValueError(f"{name!r} is a single number; it needs a first dimension, one row per sample")
        lengths[name] = len(rows)
    if len(set(lengths.values())) != 1:
        seen = ", ".join(f"{name!r} has {length}" for name, length in lengths.items()) or "it is empty"
        raise ValueError(f"its tensors need the same number of rows, one per sample: {seen}")
    return batch


def _expect(value: Kind, kind: type) -> Kind:
    if not isinstance(value, kind):
        raise TypeError(f"it returned a {type(value).__name__}, not a {kind.__name__}")
    return value
