"""One machine is killed every 30 s (kill -9) and another one joins: how much of the work ends in the model.

Four emulated devices in a diloco run with an auxiliary. The oldest is killed, and at the same moment a new one is
started. Goodput: samples that ended in the model, beside what the machines could have done from the moment their
process was started to the moment it was killed; loading Python, joining and fetching the state count as lost.
"""

from __future__ import annotations

import time

from tests.processes import PeerProcess

from benchmarks.devices import (
    BATCH_SIZE,
    PROGRAM,
    RUN,
    epochs_between,
    next_epoch,
    overrun,
    samples_in,
    start_device,
    wait_until_time,
)
from benchmarks.experiment import Experiment, conflicting_roots, open_swarm, spread
from benchmarks.record import Entry

NUM_MACHINES = 4
STEP_S = 0.2
LOCAL_STEPS = 30
OVERLAP_STEPS = 10
KILL_EVERY_S = 30.0
NUM_KILLS = 10
WARM_UP_EPOCHS = 3
START_S = 300.0


def measure(arm: str, seed: int, length: float) -> Entry:
    num_kills = max(1, round(NUM_KILLS * length)) if arm == "churn" else 0
    with open_swarm(RUN.format(local_steps=LOCAL_STEPS, overlap_steps=OVERLAP_STEPS)) as swarm:
        aux = swarm.aux(swarm.folder / "run", "aux", "--backup-every-step", "0", program=PROGRAM)
        machines: list[PeerProcess] = []
        begun: dict[str, float] = {}
        ended: dict[str, float] = {}

        def start() -> None:
            name = f"machine-{len(machines)}"
            begun[name] = time.time()
            machines.append(start_device(swarm, name, swarm.invite(), STEP_S))

        for _ in range(NUM_MACHINES):
            start()
        for machine in machines:
            machine.wait_for_epoch(WARM_UP_EPOCHS, timeout_s=START_S)
        first = next_epoch(aux)
        for number in range(num_kills):
            wait_until_time(first["time"] + number * KILL_EVERY_S)
            machines[number].kill()
            ended[machines[number].state_dir.name] = time.time()
            start()
        wait_until_time(first["time"] + max(1, round(NUM_KILLS * length)) * KILL_EVERY_S)
        last = next_epoch(aux)
        joined = {m.state_dir.name: m.wait_for("joined", timeout_s=START_S)["time"] for m in machines}
        epochs = epochs_between(aux, first, last)
        done = samples_in(epochs)
        rate = BATCH_SIZE / STEP_S

        def could(starts: dict[str, float]) -> float:
            ends = {name: min(ended.get(name, last["time"]), last["time"]) for name in starts}
            lives: list[float] = [ends[name] - max(start, first["time"]) for name, start in starts.items()]
            return rate * sum(max(0.0, life) for life in lives)

        return {
            "value": 100 * done / could(begun),
            "value_joined": 100 * done / could(joined),
            "joining_s": sum(joined[m] - begun[m] for m in joined) / len(joined),
            "kills": num_kills,
            "epochs": len(epochs),
            "longest_epoch_s": max(event["seconds"] for event in epochs),
            "conflicts": conflicting_roots(swarm.peers),
            "overrun": max(overrun(machine, STEP_S) for machine in machines),
        }


SUITE = Experiment(
    title=f"{NUM_MACHINES} machines, one killed and one started every {KILL_EVERY_S:g} s",
    unit="goodput, %",
    arms=("calm", "churn"),
    measure=measure,
    has_times=True,
    columns={
        "machines killed": spread("kills", "{:.0f}"),
        "goodput, % (from the start of a process)": spread("value"),
        "goodput, % (from when it has joined)": spread("value_joined"),
        "seconds to join": spread("joining_s"),
        "longest epoch, s": spread("longest_epoch_s"),
        "epochs": spread("epochs", "{:.0f}"),
        "epochs with different roots": spread("conflicts", "{:.0f}"),
    },
)
