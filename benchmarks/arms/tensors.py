"""The tensors every arm averages, and the clock and the report that are the same for all of them."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Callable

import torch

from benchmarks.averaging import NUM_ROUNDS, NUM_TENSORS, SHAPE
from benchmarks.team import Team

Tensors = list[torch.Tensor]


def make_tensors(rank: int) -> Tensors:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(SHAPE, generator=generator) for _ in range(NUM_TENSORS)]


def restore(flat: torch.Tensor, tensors: Tensors) -> None:
    for tensor, values in zip(tensors, flat.view(-1, *SHAPE), strict=True):
        tensor.copy_(values)


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
        digests.append(_digest(tensors()))
    team.meet("done")
    print(json.dumps({"seconds": seconds, "digests": digests, "cpu_seconds": cpu_seconds}))


def _digest(tensors: Tensors) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
