"""Whether this machine can carry a run's model: the trainer's part of `collab doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from collab_core.doctor import BOTH, Check, Role
from collab_core.doctor.machine import MIN_DISK_BYTES, SYSTEM_BYTES, available_memory, disk, size
from collab_core.errors import TaskError
from collab_core.run.settings import RunSettings
from collab_core.state.layout import Layout
from collab_core.update.optimizer import RULES
from collab_trainer.context import TaskContext
from collab_trainer.device import describe, pick_device
from collab_trainer.task import Task, load_task

VALUE_BYTES = 4
NUM_STATES = 4  # the one we work on, two that others may be fetching, one that is being made
NUM_ROUND_BUFFERS = 4  # what a codec still owes, what comes and goes in a round
NUM_MODEL_COPIES = 3  # parameters, gradients, and the vector they are collected in
MEASURED = "about"  # 25 M parameters with AdamW: 80 bytes each by this count, 79 to 92 when it was measured

TRAIN: frozenset[Role] = frozenset({"train"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a run's model takes, in bytes; without the activations of a batch, which can be made small."""

    num_params: int
    state: int
    """One whole state, as it is kept on disk and sent to newcomers."""
    aux_memory: int
    trainer_memory: int
    device_memory: int
    """Of the GPU, where there is one: the rest is then elsewhere."""

    @classmethod
    def of(cls, settings: RunSettings, task: Task, device: torch.device) -> Need:
        """Of this run, without building its model if its task allows that."""
        layout = Layout.of(_sizes_only(task))
        moments = len(RULES[settings.update.name](settings.update, ()).state_names)
        values = VALUE_BYTES * layout.num_values
        state = values + moments * VALUE_BYTES * layout.num_params
        own_steps = 0 if settings.strategy.name == "allreduce" else 2 * values  # the moments of our own optimizer
        model = NUM_MODEL_COPIES * values + own_steps
        shared = NUM_STATES * state + NUM_ROUND_BUFFERS * values
        is_elsewhere = device.type == "cuda"
        return cls(
            num_params=layout.num_params,
            state=state,
            aux_memory=SYSTEM_BYTES + shared + values,
            trainer_memory=SYSTEM_BYTES + shared + (values if is_elsewhere else model),
            device_memory=model if is_elsewhere else 0,
        )

    @property
    def disk(self) -> dict[Role, int]:
        """A backup beside the one it replaces, and a download; an auxiliary keeps twenty versions, most as changes."""
        return {"train": MIN_DISK_BYTES + 3 * self.state, "aux": MIN_DISK_BYTES + 12 * self.state}


def device_checks(name: str) -> Iterator[Check]:
    """Where we would compute."""
    yield Check(name="device", ok=True, detail=describe(pick_device(name)))


def memory_checks() -> Iterator[Check]:
    """Without a run to compare with: whether there is any at all."""
    free = available_memory()
    if free >= SYSTEM_BYTES:
        yield Check(name="memory", ok=True, detail=f"{size(free)} are free")
        return
    detail = f"{size(free)} are free, and a peer takes {size(SYSTEM_BYTES)} before it has a model"
    yield Check(name="memory", ok=False, detail=detail, fix=_free_some(SYSTEM_BYTES), rules_out=BOTH)


def model_checks(settings: RunSettings, context: TaskContext, device_name: str, state_dir: Path) -> Iterator[Check]:
    """The run's task, then memory and disk for its model."""
    task = load_task(settings.task, context)
    yield Check(name="task", ok=True, detail=_task_words(settings))
    device = pick_device(device_name)
    need = Need.of(settings, task, device)
    yield _memory(need, device)
    yield disk(state_dir, need.disk)


def _task_words(settings: RunSettings) -> str:
    package = f" of {settings.task.package}" if settings.task.package else ""
    return f"{settings.task.name}{package} can be loaded"


def _memory(need: Need, device: torch.device) -> Check:
    free = available_memory()
    needs: dict[Role, int] = {"train": need.trainer_memory, "aux": need.aux_memory}
    lacking = {role: memory for role, memory in needs.items() if free < memory}
    words = f"the model has {_millions(need.num_params)} parameters and takes {MEASURED}"
    if lacking:
        what = " and ".join(f"{size(memory)} to {role}" for role, memory in lacking.items())
        return Check(
            name="memory",
            ok=False,
            detail=f"{words} {what}; {size(free)} are free",
            fix=_free_some(max(lacking.values())),
            rules_out=frozenset(lacking),
        )
    if need.device_memory and (on_device := torch.cuda.mem_get_info(device)[0]) < need.device_memory:
        return Check(
            name="memory",
            ok=False,
            detail=f"{words} {size(need.device_memory)} of the GPU's memory; {size(on_device)} are free",
            fix="End what else uses the GPU (`nvidia-smi` shows it), or train on another device: --device cpu",
            rules_out=TRAIN,
        )
    return Check(name="memory", ok=True, detail=f"{words} {size(need.trainer_memory)} to train; {size(free)} are free")


def _free_some(num_bytes: int) -> str:
    return (
        f"Join from a machine where {size(num_bytes)} are free, or end other programs here; `free -h` shows the rest."
    )


def _sizes_only(task: Task) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return task.build_model()
    except (NotImplementedError, RuntimeError, TypeError, TaskError):  # some look at their values while they are built
        return task.build_model()


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,}"
