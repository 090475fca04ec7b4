"""How much of their time machines compute, and how much they wait, on home links: 4 emulated devices in the lab.

Every device is a host of its own (network namespaces, needs root) with a link of 10 or 100 Mbit/s each way. A step is a
real one of a GPT of 0.8 M parameters, then padded to PAD_S, so that 4 devices fit on two cores. A run whose steps took
longer than their padding allows is not counted.
"""

from __future__ import annotations

import statistics

from benchmarks.record import Entry
from benchmarks.suite import Suite
from benchmarks.team import TeamFailed, run_team

NUM_DEVICES = 4
PAD_S = 0.4
MAX_OVERRUN = 1.05
BATCH_SIZE = 4
MODEL = {"layers": 4, "width": 128}
LOCAL_STEPS = {"alone": 50, "diloco": 50, "diloco-100": 100, "diloco-topk": 50}
OVERLAP = 5
"""Steps that are taken while a round is under way."""
NUM_STEPS = {"ddp": 20, "hivemind": 8, "allreduce": 20}  # who averages every step needs no more to show it
OTHER_STEPS = 200
NUM_WARM_UP = {"diloco": 40, "diloco-100": 40, "diloco-topk": 40, "hivemind": 2}
TIMEOUT_S = 600


def measure(arm: str, size: int) -> Entry:
    from tests.lab import Lab

    module = f"links_{arm}" if arm in ("ddp", "hivemind") else "links_collab"
    with Lab() as lab:
        hosts = [lab.host(f"h{rank}") for rank in range(NUM_DEVICES)]
        for host in hosts:
            host.limit(up_mbit=size, down_mbit=size)
        arguments = [arm, *(host.ip for host in hosts)]
        prefixes = [host.prefix for host in hosts]
        reports = run_team(f"benchmarks.arms.{module}", arguments, NUM_DEVICES, TIMEOUT_S, prefixes)
    overrun = max(report["step_s"] for report in reports) / PAD_S
    if overrun > MAX_OVERRUN:
        raise TeamFailed(f"{arm}: steps took {overrun:.2f} × their padding; the machine is too busy")
    return {key: statistics.mean(report[key] for report in reports) for key in reports[0]}


def _share(entries: list[Entry]) -> str:
    return f"{100 * PAD_S / statistics.median(entry['seconds'] for entry in entries):.1f}"


def _kilobytes(entries: list[Entry]) -> str:
    return f"{statistics.median(entry['bytes_sent'] for entry in entries) / 1e3:.1f}"


def _cpu(entries: list[Entry]) -> str:
    return f"{statistics.median(entry['cpu_seconds'] for entry in entries):.3f}"


SUITE = Suite(
    title=f"Seconds per step of {PAD_S:g} s, {NUM_DEVICES} emulated devices",
    sizes=(10, 100),
    unit_of_size="Mbit/s",
    arms=("alone", "ddp", "allreduce", "diloco", "diloco-100", "diloco-topk", "hivemind"),
    measure=measure,
    compared_with=("alone",),
    columns={"% of the time computing": _share, "kB sent per step": _kilobytes, "CPU s per step": _cpu},
)
