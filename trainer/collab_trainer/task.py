"""What a task is: a model, its data and its loss. Training loops know tasks only through this protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from pydantic import ValidationError

from collab_core.errors import Code, TaskError
from collab_core.run.settings import Section, TaskSettings

TASK_NAMES = ("tiny-gpt",)

Batch: TypeAlias = torch.Tensor
"""Samples, one per row. Token tasks: int64 [batch, sequence + 1], where each token predicts the next."""

Options = TypeVar("Options", bound=Section)


class Task(Protocol):
    """A model, its data and its loss, the same on every peer except for the order of the data."""

    @property
    def floor(self) -> float | None:
        """The lowest loss `evaluate` can reach by learning, in nats per token, if it is known."""

    def build_model(self) -> torch.nn.Module:
        """A new model on the CPU, initialised from the run's seed: the same bytes on every machine."""

    def batches(self, *, seed: int, batch_size: int) -> Iterator[Batch]:
        """Endless training batches, others for another seed."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the samples of the batch, on the model's device."""

    def evaluate(self, model: torch.nn.Module) -> float:
        """The loss on fixed held-out data, the same for every peer."""

    def sample(self, model: torch.nn.Module) -> str:
        """Something a person can look at; the same model always gives the same."""


def load_task(settings: TaskSettings) -> Task:
    """The task that a run names.

    Raises:
        TaskError: the task is unknown here, or one of its options is not allowed.
    """
    if settings.name == "tiny-gpt":
        from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions

        return TinyGPT(seed=settings.seed, options=read_options(settings, TinyGPTOptions))
    raise TaskError(
        Code.UNKNOWN_TASK,
        f"The run wants the task {settings.name!r}, which is not known here; known: {', '.join(TASK_NAMES)}.",
        fix=_did_you_mean(settings.name, TASK_NAMES) + "Correct task.name in run.toml, or install a newer Collab.",
    )


def read_options(settings: TaskSettings, options_type: type[Options]) -> Options:
    """A task's options, checked.

    Raises:
        TaskError: an option is unknown, or has a value that is not allowed. Only the first one is named.
    """
    try:
        return options_type.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    known = list(options_type.model_fields)
    fix = f"Change [task.options] in run.toml; the options of {settings.name} are: {', '.join(known)}."
    if not first["loc"]:  # two options contradict each other: the message names both
        raise TaskError(Code.BAD_TASK_OPTION, f"{first['ctx']['error']}.", fix=fix)
    name = str(first["loc"][0])
    if name not in known:
        message = f"The task {settings.name} has no option {name!r} (seen: {name} = {settings.options[name]!r})."
        raise TaskError(Code.BAD_TASK_OPTION, message, fix=_did_you_mean(name, known) + fix)
    allowed = _allowed(options_type.model_json_schema()["properties"][name]) or first["msg"]
    message = f"The option {name} = {settings.options[name]!r} of the task {settings.name} is not allowed: {allowed}."
    raise TaskError(Code.BAD_TASK_OPTION, message, fix=fix)


def _allowed(schema: Mapping[str, Any]) -> str | None:
    if schema.get("type") == "integer" and "minimum" in schema and "maximum" in schema:
        return f"it must be a whole number from {schema['minimum']} to {schema['maximum']}"
    return None


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
