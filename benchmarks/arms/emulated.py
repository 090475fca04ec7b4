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


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


def pretend_to_work() -> None:
    time.sleep(WORK_S / NUM_BATCHES)


class Emulated:
    """Enough of a task to train."""

    floor = None

    def build_model(self) -> torch.nn.Module:
        return build_model()

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        generator = torch.Generator().manual_seed(block.number)
        return {"x": torch.randn(NUM_BATCHES * BATCH_SIZE, WIDTH, generator=generator)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        pretend_to_work()
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
        (start, cpu_before, sent_before), (end, cpu_after, sent_after) = (
            self._starts[NUM_WARM_UP],
            self._starts[NUM_EPOCHS],
        )
        num_epochs = NUM_EPOCHS - NUM_WARM_UP
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
