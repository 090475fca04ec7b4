"""Machines of unequal speed: what four of them do together, beside what each does alone.

Steps take 1×, 1×, 2× and 4× as long (real steps of a small model, padded: emulated devices). The parts: each device in
a run of its own, with nobody to wait for. Together: one diloco run with an auxiliary. What counts is samples per second
that ended in the model.
"""

from __future__ import annotations

import time

from tests.processes import wait_until

from benchmarks.devices import (
    BATCH_SIZE,
    PROGRAM,
    RUN,
    epochs_between,
    next_epoch,
    overrun,
    samples_in,
    start_device,
    steps_of,
    wait_until_time,
)
from benchmarks.experiment import Experiment, conflicting_roots, open_swarm, spread
from benchmarks.record import Entry, Record

STEP_S = 0.2
SPEEDS = {"first": 1, "second": 1, "third": 2, "fourth": 4}
LOCAL_STEPS = 50
OVERLAP_STEPS = 5
DURATION_S = 180.0
WARM_UP_EPOCHS = 3
START_S = 300.0
WARM_UP_STEPS = 10


def measure(arm: str, seed: int, length: float) -> Entry:
    with open_swarm(RUN.format(local_steps=LOCAL_STEPS, overlap_steps=OVERLAP_STEPS)) as swarm:
        run = swarm.folder / "run"
        if arm == "together":
            aux = swarm.aux(run, "aux", "--backup-every-step", "0", program=PROGRAM)
            start, source = time.time(), swarm.invite()
        else:
            source = str(run)
        devices = {name: start_device(swarm, name, source, STEP_S * speed) for name, speed in SPEEDS.items()}
        report: Entry = {"conflicts": 0}
        if arm == "together":
            for device in devices.values():
                device.wait_for_epoch(WARM_UP_EPOCHS, timeout_s=START_S)
            first = next_epoch(aux)
            wait_until_time(time.time() + DURATION_S * length)
            last = next_epoch(aux)
            epochs = epochs_between(aux, first, last)
            report["value"] = samples_in(epochs) / (last["time"] - first["time"])
            report |= {
                "conflicts": conflicting_roots(swarm.peers),
                "epochs": len(epochs),
                "start_s": first["time"] - start,
            }
        else:
            slowest = devices["fourth"]
            wait_until(lambda: len(steps_of(slowest)) > WARM_UP_STEPS, "some steps of everyone", START_S)
            wait_until_time(time.time() + DURATION_S * length)
            rates = {name: _rate(steps_of(device)) for name, device in devices.items()}
            report |= {"value": sum(rates.values()), "rates": rates}
        overruns = [overrun(device, STEP_S * SPEEDS[name]) for name, device in devices.items()]
        return {**report, "overrun": max(overruns)}


def _rate(steps: list[tuple[float, float]]) -> float:
    ends = [ended for _, ended in steps[WARM_UP_STEPS:]]
    return BATCH_SIZE * (len(ends) - 1) / (ends[-1] - ends[0])


def _share(entries: list[Entry], record: Record) -> str:
    parts = {entry["seed"]: entry["value"] for entry in record.entries_of(arm="parts")}
    shares = [100 * entry["value"] / parts[entry["seed"]] for entry in entries if entry["seed"] in parts]
    return ", ".join(f"{share:.1f}" for share in shares)


SUITE = Experiment(
    title=f"Four machines, steps of {STEP_S:g} s × 1, 1, 2 and 4",
    unit="samples per second",
    arms=("parts", "together"),
    measure=measure,
    has_times=True,
    columns={
        "samples per second": spread("value", "{:.2f}"),
        "% of the sum of the parts": _share,
        "step / padding": spread("overrun", "{:.3f}"),
        "epochs with different roots": spread("conflicts", "{:.0f}"),
    },
)
