"""A task whose work is sleep, and the clock of the `round` suite."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.arms.counters import cpu_seconds, sent_bytes
from benchmarks.round_trip import BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS, NUM_WARM_UP, WIDTH, WORK_S
from benchmarks.team import Team
from collab_trainer.task import Batch, Block, NumberedBlocks


class Device:
    """Takes its time for every batch. What this machine really computes meanwhile is part of that time, not on top."""

    def __init__(self) -> None:
        self._begun = self._done = 0.0

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        return model

    def _note(self, parameter: torch.Tensor) -> None:
        """The last of these ends a batch."""
        self._done = time.monotonic()

    def pretend_to_work(self) -> None:
        """Sleep for as long as a batch takes, less what the last one already took; then compute it."""
        time.sleep(max(0.0, WORK_S / NUM_BATCHES - (self._done - self._begun)))
        self._begun = self._done = time.monotonic()


class Emulated:
    """Enough of a task to train."""

    floor = None

    def __init__(self) -> None:
        self._device = Device()

    def build_model(self) -> torch.nn.Module:
        return self._device.build_model()

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        generator = torch.Generator().manual_seed(block.number)
        return {"x": torch.randn(NUM_BATCHES * BATCH_SIZE, WIDTH, generator=generator)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self._device.pretend_to_work()
        loss: torch.Tensor = (model(batch["x"]) - batch["x"]).square().mean()
        return loss

    def evaluate(self, model: torch.nn.Module) -> float:
        return 0.0

    def sample(self, model: torch.nn.Module) -> str:
        return ""


class EpochClock:
    """Notes when this peer begins each epoch."""

    def __init__(self) -> None:
        self._starts: dict[int, tuple[float, float, int]] = {}

    def begin(self, epoch: int) -> None:
        self._starts.setdefault(epoch, (time.monotonic(), cpu_seconds(), sent_bytes("lo")))

    def report(self, team: Team) -> None:
        """Once the last epoch has begun."""
        # who fetched the state of a later epoch begins to count there
        first, last = (min(epoch for epoch in self._starts if epoch >= at) for at in (NUM_WARM_UP, NUM_EPOCHS))
        (start, cpu_before, sent_before), (end, cpu_after, sent_after) = self._starts[first], self._starts[last]
        num_epochs = last - first
        team.meet("done")
        print(
            json.dumps(
                {
                    "seconds_per_epoch": (end - start) / num_epochs,
                    "cpu_seconds": (cpu_after - cpu_before) / num_epochs,
                    "bytes_of_all": (sent_after - sent_before) / num_epochs,
                }
            )
        )
