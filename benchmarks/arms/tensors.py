"""The tensors every arm averages, and the clock and the report that are the same for all of them."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable

import torch
from blake3 import blake3

from benchmarks.averaging import NUM_ROUNDS, NUM_TENSORS, NUM_VALUES, SHAPE
from benchmarks.team import Team

Tensors = list[torch.Tensor]


def make_flat(rank: int) -> torch.Tensor:
    """All tensors, one after the other in one piece of memory."""
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(rank))


def tensors_of(flat: torch.Tensor) -> Tensors:
    return list(flat.view(NUM_TENSORS, *SHAPE))


def measure_rounds(team: Team, run_round: Callable[[int], float | None], tensors: Callable[[], Tensors]) -> None:
    """Time the rounds and print the report. A round that returns seconds has used a clock of its own."""
    seconds, digests, cpu_seconds = [], [], 0.0
    for number in range(NUM_ROUNDS):
        team.meet(f"round-{number}")
        start, cpu_start = time.perf_counter(), _cpu_seconds()
        own = run_round(number)
        seconds.append(time.perf_counter() - start if own is None else own)
        if number:  # the first round warms up
            cpu_seconds += _cpu_seconds() - cpu_start
        if held := tensors():
            digests.append(_digest(held))
    team.meet("done")
    print(json.dumps({"seconds": seconds, "digests": digests, "cpu_seconds": cpu_seconds}))


def _digest(tensors: Tensors) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
