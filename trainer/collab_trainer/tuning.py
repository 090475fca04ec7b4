"""The batch size with which this machine gets most done, found by trying: for volunteers who did not choose one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from collab_core.memory import is_out_of_memory
from collab_core.run.settings import RunSettings
from collab_core.telemetry import EventLog
from collab_trainer.batches import num_samples
from collab_trainer.device import autocast, release
from collab_trainer.task import Batch, Task

TUNING_S = 2.0  # a volunteer should see the first epoch soon
FIRST = 8  # a busy machine makes small batches look as good as large ones, so they are not even tried
MAX_PASS_S = 4.0  # of a slow machine: it could not follow the swarm with longer ones
MIN_PASS_S = 0.05  # shorter ones are repeated: a clock and a busy machine are not that exact
MUCH_WORSE = 0.7  # of the best speed so far: larger ones will not be better; less may be another program's doing
GOOD_ENOUGH = 0.9  # of the best speed: smaller batches notice sooner what the swarm does
SHARE = 4  # a trainer looks at the swarm at least so many times while a batch of all is collected
OWN_STEPS = 32  # where trainers step by themselves the batch is part of the recipe: only how much at once is tuned


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size, tried."""

    batch_size: int
    samples_per_second: float
    """0: it does not fit into memory."""


def largest_batch(settings: RunSettings, accumulate_batches: int = 1) -> int:
    """The largest batch that makes sense in a run, where so many of them make a step."""
    is_shared = settings.strategy.name == "allreduce"
    most = settings.strategy.target_batch_size // SHARE if is_shared else OWN_STEPS
    return max(1, min(most, settings.limits.max_samples_per_peer) // accumulate_batches)


def train_with(at_once: int, settings: RunSettings, accumulate_batches: int = 1) -> int:
    """The batch size of a trainer that is fastest with so many samples at once."""
    return at_once if settings.strategy.name == "allreduce" else largest_batch(settings, accumulate_batches)


def try_batches(task: Task, model: torch.nn.Module, rows: Batch, device: torch.device, largest: int) -> Iterator[Trial]:
    """8, 16, 32, … samples at once, until more brings nothing, does not fit, or takes too long; fewer if 8 do already.

    Args:
        task: what is trained.
        model: on its device; its parameters and buffers are as before when this ends.
        rows: some samples on the CPU; they are repeated where more are needed.
        device: where to compute.
        largest: where to stop.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    was_training = model.training
    model.train()
    try:
        _speed(task, model, _repeated(rows, 1), device)  # the first pass of all also loads what is loaded only once
        deadline = time.monotonic() + TUNING_S
        size, best = min(FIRST, largest), 0.0
        while True:
            trial = Trial(size, _speed(task, model, _repeated(rows, size), device))
            yield trial
            speed = trial.samples_per_second
            if not best and size > 1 and (not speed or size / speed > MAX_PASS_S):
                size = max(1, size // 2 if not speed else min(size // 2, int(MAX_PASS_S * speed)))
                continue
            is_worse = speed < MUCH_WORSE * best
            best = max(best, speed)
            is_late = bool(best) and time.monotonic() + 2 * size / best > deadline  # the next one takes twice as long
            if size < FIRST or size == largest or not speed or is_worse or is_late:
                return
            size = min(2 * size, largest)
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        model.train(was_training)
        release(device)


def choose_batch(
    task: Task,
    model: torch.nn.Module,
    rows: Batch,
    device: torch.device,
    settings: RunSettings,
    accumulate_batches: int,
    events: EventLog,
) -> tuple[int, int]:
    """The batch size to train with, and how many of its rows to take at once, told as an event.

    Args:
        task, model, rows, device: see `try_batches`.
        settings: of the run.
        accumulate_batches: so many make a step.
        events: where to tell.
    """
    largest = largest_batch(settings, accumulate_batches)
    trials = list(try_batches(task, model, rows, device, largest))
    at_once = best_batch(trials)
    batch_size = train_with(at_once, settings, accumulate_batches)
    speed = next((trial.samples_per_second for trial in trials if trial.batch_size == at_once), 0.0)
    events.write(
        "tuned",
        batch_size=batch_size,
        rows=at_once,
        samples_per_second=round(speed, 1),
        tried={str(trial.batch_size): round(trial.samples_per_second, 1) for trial in trials},
    )
    return batch_size, at_once


def best_batch(trials: Sequence[Trial]) -> int:
    """The smallest that is about as fast as the fastest."""
    fastest = max((trial.samples_per_second for trial in trials), default=0.0)
    fast = (trial.batch_size for trial in trials if trial.samples_per_second >= GOOD_ENOUGH * fastest)
    return min(fast, default=1)


def _speed(task: Task, model: torch.nn.Module, batch: Batch, device: torch.device) -> float:
    """Samples per second; 0 if memory ran out."""
    started, count = time.monotonic(), 0
    try:
        while not count or time.monotonic() - started < MIN_PASS_S:
            _pass(task, model, batch, device)
            count += 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return 0.0
    return count * num_samples(batch) / (time.monotonic() - started)


def _pass(task: Task, model: torch.nn.Module, batch: Batch, device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    moved = {name: rows.to(device) for name, rows in batch.items()}
    with autocast(device):
        loss = task.loss(model, moved)
    loss.backward()  # type: ignore[no-untyped-call]
    float(loss.detach())  # a GPU is not done before somebody asks for the result


def _repeated(rows: Batch, size: int) -> Batch:
    here = num_samples(rows)
    return {name: values[torch.arange(size) % here] for name, values in rows.items()}
