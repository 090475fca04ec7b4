"""What a task is: a model, its data and its loss. Training loops know tasks only through this protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from collab_core.errors import Code, TaskError
from collab_core.run.settings import Section, TaskSettings
from collab_trainer.context import TaskContext
from collab_trainer.options import did_you_mean, read_options

TASK_NAMES = ("tiny-gpt", "causal-lm")

Batch: TypeAlias = dict[str, torch.Tensor]
"""Samples, one per row: tensors with the same first dimension. Names are between a task's `samples` and its `loss`."""


class TaskOptions(Section):
    """`[task.options]` of a task: a pydantic model, strict, without unknown keys, frozen."""


class Blocks(Protocol):
    """A peer's own endless stream of raw data. One thread at a time asks for the next block, so it should be quick."""

    def __next__(self) -> Any:
        """Data that this stream has not given before, in whatever form the task's `samples` takes."""

    @property
    def position(self) -> dict[str, Any]:
        """Where to go on after what was given so far; plain values that JSON keeps."""


class Block(NamedTuple):
    """A block of generated data: nothing but what it is generated from."""

    seed: int
    number: int


class NumberedBlocks:
    """Blocks for tasks whose data can be made, or found, from a number: 0, 1, 2, …"""

    def __init__(self, seed: int, position: Mapping[str, Any] | None) -> None:
        self._seed = seed
        self._next = int(position["next"]) if position else 0

    def __next__(self) -> Block:
        self._next += 1
        return Block(self._seed, self._next - 1)

    @property
    def position(self) -> dict[str, Any]:
        return {"next": self._next}


class Task(Protocol):
    """A model, its data and its loss, the same on every peer except for the order of the data."""

    @property
    def floor(self) -> float | None:
        """The lowest loss `evaluate` can reach by learning, if it is known."""

    def build_model(self) -> torch.nn.Module:
        """A new model on the CPU, initialised from the run's seed: the same bytes on every machine."""

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> Blocks:
        """The training data of the peer with this seed, from a position that its blocks had, or from the start."""

    def samples(self, block: Any) -> Batch:
        """Training samples from one block, any number of them. Called by several threads at once: keep no state."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the samples of the batch, on the model's device."""

    def evaluate(self, model: torch.nn.Module) -> float:
        """The loss on fixed held-out data, the same for every peer."""

    def sample(self, model: torch.nn.Module) -> str:
        """Something a person can look at; the same model always gives the same."""


def dataset_size(task: Task) -> int | None:
    """How many samples a peer's own data has, if its task says so: its weight where models of unequal data meet.

    A task may have a property `dataset_size`; most data has no end, or none that is known.
    """
    size = getattr(task, "dataset_size", None)
    return size if isinstance(size, int) and size > 0 else None


def tokens_per_sample(settings: TaskSettings) -> int | None:
    """How many tokens a sample of a task has, if it counts in tokens at all and is built in."""
    if settings.name == "tiny-gpt":
        from collab_trainer.tiny_gpt import TinyGPTOptions

        return read_options(settings, TinyGPTOptions).sequence_length
    if settings.name == "causal-lm":
        from collab_trainer.causal_lm import CausalLMOptions

        return read_options(settings, CausalLMOptions).sequence_length
    return None


def collect_assets(settings: TaskSettings, run_dir: Path) -> dict[str, bytes]:
    """Files that every peer needs for this task; the organiser's side, which may read its folder and download."""
    if settings.name == "causal-lm":
        from collab_trainer.causal_lm import CausalLMOptions, collect_files

        return collect_files(read_options(settings, CausalLMOptions), run_dir)
    return {}


def load_task(settings: TaskSettings, context: TaskContext | None = None) -> Task:
    """The task that a run names.

    Args:
        settings: `[task]` of the run file.
        context: where it is loaded; by default a place with no files and no data.

    Raises:
        TaskError: the task is unknown here, or one of its options is not allowed.
    """
    if settings.name == "tiny-gpt":
        from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions

        return TinyGPT(seed=settings.seed, options=read_options(settings, TinyGPTOptions))
    if settings.name == "causal-lm":
        from collab_trainer.causal_lm import CausalLM, CausalLMOptions

        options = read_options(settings, CausalLMOptions)
        return CausalLM(seed=settings.seed, options=options, context=context or TaskContext())
    from collab_trainer.custom import is_custom, load_custom_task

    if is_custom(settings.name):
        return load_custom_task(settings)
    form = "The task of a package is written 'package.module:Class'. " if {".", ":"} & set(settings.name) else ""
    raise TaskError(
        Code.UNKNOWN_TASK,
        f"The run wants the task {settings.name!r}, which is not known here; known: {', '.join(TASK_NAMES)}.",
        fix=did_you_mean(settings.name, TASK_NAMES)
        + form
        + "Correct task.name in run.toml, or install a newer Collab.",
    )
