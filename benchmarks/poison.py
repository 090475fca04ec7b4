"""Two hostile trainers among eight: how good the model gets beside one without them, and who is named for it.

An allreduce run of the built-in task with the settings of a new run (`reduction = "mean"`), equal samples in every arm.
The hostile ones, one lie per arm: the opposite of their gradient ten times as large (`flip`), noise ten times as large
(`random`), values that are not finite (`nan`), a huge weight (`weight`), and `flip` with the norm of an honest
contribution declared (`hidden`). They are the real command with one method replaced, and never stop. Steps are padded
to 0.06 s, so that two cores are enough and every epoch gets about its 256 samples.
"""

from __future__ import annotations

import statistics

import torch
from tests.processes import PeerProcess

from benchmarks.devices import PROGRAM
from benchmarks.experiment import Experiment, conflicting_roots, open_swarm, spread
from benchmarks.record import Entry, Record
from collab_core.run import RunFolder
from collab_core.run.settings import RunSettings
from collab_core.state.backup import read_backup
from collab_trainer import load_task

NUM_TRAINERS = 8
NUM_HOSTILE = 2
NUM_EPOCHS = 250
REDUCTION = "mean"  # that of a new run
STEP_S = 0.06
START_S, EPOCH_S = 180.0, 3.0

RUN = """\
name = "poison"
[task]
seed = {seed}
[task.options]
sequence_length = 64
[strategy]
target_batch_size = 256
reduction = "{reduction}"
[optimizer]
decay = "cosine"
decay_epochs = {num_epochs}
[limits]
max_epochs = {num_epochs}
[checkpoints]
every = 0
evaluate = 0
"""


def measure(arm: str, seed: int, length: float) -> Entry:
    num_epochs = max(10, round(NUM_EPOCHS * length))
    with open_swarm(RUN.format(seed=seed, num_epochs=num_epochs, reduction=REDUCTION)) as swarm:
        aux = swarm.aux(swarm.folder / "run", "aux", "--backup-every-step", str(num_epochs))
        num_hostile = 0 if arm == "clean" else NUM_HOSTILE
        for number in reversed(range(NUM_TRAINERS)):
            is_hostile = number < num_hostile
            if number == num_hostile - 1:  # the hostile ones come last: one alone with the first would be all there is
                for peer in swarm.peers:
                    peer.wait_for("joined", timeout_s=START_S)
            environment = {"PAD_S": str(STEP_S), **({"HOSTILE": arm} if is_hostile else {})}
            name = f"hostile-{number}" if is_hostile else f"honest-{number}"
            swarm.trainer(name, "--name", name, "--backup-every-step", "0", env=environment, program=PROGRAM)
        aux.wait_for_epoch(num_epochs, timeout_s=START_S + num_epochs * EPOCH_S)
        aux.stop()
        honest = [peer for peer in swarm.peers if not peer.state_dir.name.startswith("hostile")]
        hostile = {peer.state_dir.name for peer in swarm.peers} - {peer.state_dir.name for peer in honest}
        members = [event["members"] for event in aux.events("epoch")]
        return {
            "value": _held_out_loss(aux, RunFolder(swarm.folder / "run")),
            "named_by": sum(hostile <= _named(peer) for peer in honest),
            "honest": len(honest),
            "banned": sum(event["name"] not in hostile for peer in honest for event in peer.events("quarantined"))
            + sum(len(peer.events("kept_out")) for peer in honest),
            "hostile_share": 100 * statistics.mean(any(who in hostile for who in names) for names in members),
            "samples_per_epoch": statistics.mean(event["samples"] for event in aux.events("epoch")),
            "conflicts": conflicting_roots(honest),
        }


def _held_out_loss(aux: PeerProcess, run: RunFolder) -> float:
    """Of the last state, as the run's task measures it."""
    backup = read_backup(aux.state_dir / "backup.collab", aux.wait_for_last("joined")["run_id"])
    assert backup is not None, "the auxiliary kept no state"
    task = load_task(_settings(run).task)
    torch.set_num_threads(1)  # two that wait for each other are slower on a busy machine
    model = task.build_model()
    values = {name.removeprefix("model/"): value for name, value in backup.tensors.items() if name.startswith("model/")}
    model.load_state_dict(values, strict=False)
    return task.evaluate(model)


def _settings(run: RunFolder) -> RunSettings:
    from collab_core.run.runfile import load_run_file

    return load_run_file(run.run_file)


def _named(peer: PeerProcess) -> set[str]:
    """Whom a peer's event log names as somebody who did wrong."""
    told = {event["name"] for kind in ("refused", "quarantined") for event in peer.events(kind)}
    return told | {name for event in peer.events("clipped") for name in event["senders"]}


def _excess(entries: list[Entry], record: Record) -> str:
    clean = {entry["seed"]: entry["value"] for entry in record.entries_of(arm="clean")}
    excess = [100 * (entry["value"] / clean[entry["seed"]] - 1) for entry in entries if entry["seed"] in clean]
    text = f"{statistics.mean(excess):+.1f}"
    return f"{text} ({min(excess):+.1f} – {max(excess):+.1f})" if len(excess) > 1 else text


def _named_by(entries: list[Entry], record: Record) -> str:
    if entries[0]["arm"] == "clean":
        return "–"
    return f"{min(entry['named_by'] for entry in entries)} of {entries[0]['honest']}"


SUITE = Experiment(
    title=f"{NUM_TRAINERS} trainers, {NUM_HOSTILE} of them hostile: held-out loss after {NUM_EPOCHS} epochs",
    unit="nats per byte, lower is better",
    arms=("clean", "flip", "random", "nan", "weight", "hidden"),
    measure=measure,
    has_times=False,
    columns={
        "held-out loss": spread("value", "{:.4f}"),
        "% above clean": _excess,
        "both named by (honest peers)": _named_by,
        "honest peers banned": spread("banned", "{:.0f}"),
        "% of epochs with a hostile member": spread("hostile_share", "{:.0f}"),
        "samples per epoch": spread("samples_per_epoch", "{:.0f}"),
        "epochs with different roots": spread("conflicts", "{:.0f}"),
    },
)
