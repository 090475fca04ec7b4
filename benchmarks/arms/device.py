"""An emulated device: real steps of a small GPT, padded to the same length, and what they cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.arms.counters import cpu_seconds, sent_bytes
from benchmarks.links import BATCH_SIZE, MODEL, NUM_STEPS, NUM_WARM_UP, OTHER_STEPS, PAD_S
from benchmarks.team import Team
from collab_trainer.task import Block
from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions


def make_task() -> TinyGPT:
    return TinyGPT(seed=0, options=TinyGPTOptions.model_validate(MODEL))


def batches(task: TinyGPT, rank: int) -> Iterator[dict[str, Any]]:
    """Endless, different for every rank."""
    number = 0
    while True:
        tokens = task.samples(Block(seed=rank, number=number))["tokens"]
        yield from ({"tokens": tokens[first : first + BATCH_SIZE]} for first in range(0, len(tokens), BATCH_SIZE))
        number += 1


class Device:
    """Pads steps, and counts."""

    def __init__(self, team: Team, arm: str) -> None:
        torch.set_num_threads(1)
        self._team = team
        self._first = NUM_WARM_UP.get(arm, 5)
        self._last = self._first + NUM_STEPS.get(arm, OTHER_STEPS)
        self._num_steps = 0
        self._begun = 0.0
        self._marks: list[tuple[float, float, int]] = []
        self._step_s: list[float] = []

    def begin_step(self) -> None:
        self._begun = time.monotonic()
        if self._num_steps in (self._first, self._last):
            self._marks.append((self._begun, cpu_seconds(), sent_bytes("eth0")))
            if self._num_steps == self._last:
                self._team.tell("done")
        self._num_steps += 1

    def end_step(self) -> None:
        time.sleep(max(0.0, self._begun + PAD_S - time.monotonic()))
        self._step_s.append(time.monotonic() - self._begun)

    @property
    def is_done(self) -> bool:
        """Everyone has its steps; until then go on, as others still average with us."""
        return all((self._team.folder / f"done-{rank}").exists() for rank in range(self._team.size))

    def report(self) -> None:
        (start, cpu_before, sent_before), (end, cpu_after, sent_after) = self._marks
        num_steps = self._last - self._first
        counted = self._step_s[self._first : self._last]
        print(
            json.dumps(
                {
                    "seconds": (end - start) / num_steps,
                    "step_s": sum(counted) / len(counted),
                    "cpu_seconds": (cpu_after - cpu_before) / num_steps,
                    "bytes_sent": (sent_after - sent_before) / num_steps,
                }
            )
        )
