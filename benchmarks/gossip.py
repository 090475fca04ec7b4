"""Eight peers with shards that are neither alike nor equally large: gossip beside allreduce, and how gossip ends.

The task is `causal-lm` on text files: every trainer brings its own (`--data-dir`). Samples are equal in every arm. In
the gossip arms the bootstrap peer, the only auxiliary, is killed as soon as everyone has made two rounds. `converged`
has no last round: it is over when the trainers find that it is.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from tests.processes import PeerProcess, SwarmOfProcesses

from benchmarks.experiment import Experiment, open_swarm, spread
from benchmarks.record import Entry, Record
from benchmarks.shards import HELD_OUT, SHARD, SIZES, write_shards
from collab_core.run import RunFolder
from collab_core.run.runfile import load_run_file
from collab_core.state.backup import read_backup
from collab_trainer import Task, TaskContext, collect_assets, load_task

BATCH_SIZE = 8
STEPS_PER_ROUND = 2
NUM_STEPS = 600
LR = {"allreduce": 0.02, "gossip": 0.04, "converged": 0.04}  # the best of those tried for each, see docs/benchmarks.md
CONSENSUS = 1e-3
ENTER_S, STEP_S = 240.0, 2.0
EARLY = 2

RUN = """\
name = "shards"
[task]
name = "causal-lm"
seed = {seed}
[task.options]
sequence_length = 64
[task.options.model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
[task.options.tokenizer]
kind = "bytes"
[[task.options.data]]
files = ["{shard}"]
documents = "line"
[task.options.evaluation]
num_sequences = 128
[[task.options.evaluation.data]]
files = ["{held_out}"]
documents = "line"
[strategy]
name = "{strategy}"
target_batch_size = {target}
codec = "none"
[optimizer]
lr = {lr}
warmup_epochs = {warmup}
decay = "cosine"
decay_epochs = {decay}
final_lr_fraction = 0.01
[limits]
max_samples_per_peer = 100000
max_epochs = {max_epochs}
[checkpoints]
every = 0
evaluate = 0
"""

ENDING = """\
[gossip]
stop = "converged"
window = 10
"""


def run_text(arm: str, seed: int, num_steps: int) -> str:
    """The run file: in every arm a peer takes `num_steps` steps of BATCH_SIZE samples, about, until the rate is low."""
    is_gossip = arm != "allreduce"
    num_epochs = num_steps // STEPS_PER_ROUND if is_gossip else num_steps
    text = RUN.format(
        seed=seed,
        shard=SHARD,
        held_out=HELD_OUT,
        strategy="gossip" if is_gossip else "allreduce",
        target=BATCH_SIZE * (STEPS_PER_ROUND if is_gossip else len(SIZES)),
        lr=LR[arm],
        warmup=num_epochs // 10,
        decay=num_epochs - num_epochs // 10,
        max_epochs=0 if arm == "converged" else num_epochs,
    )
    return text + ENDING if arm == "converged" else text


def measure(arm: str, seed: int, length: float) -> Entry:
    num_steps = max(4 * STEPS_PER_ROUND, round(NUM_STEPS * length))
    with open_swarm(run_text(arm, seed, num_steps)) as swarm:
        folders = write_shards(swarm.folder)
        aux = swarm.aux(swarm.folder / "run")
        trainers = [_start(swarm, number, folder) for number, folder in enumerate(folders)]
        if arm != "allreduce":
            for trainer in trainers:
                trainer.wait_for("round", lambda event: event["epoch"] >= EARLY, timeout_s=ENTER_S)
            aux.kill()
        for trainer in trainers:
            trainer.wait_for("left", timeout_s=ENTER_S + 2 * num_steps * STEP_S)
            trainer.process.wait(60)
        task = _task(RunFolder(swarm.folder / "run"), folders[0])
        models = [_values(trainer) for trainer in trainers]
        losses = [_loss(task, values) for values in (models[:1] if arm == "allreduce" else models)]
        report: Entry = {"value": statistics.mean(losses), "worst": max(losses)}
        if arm == "allreduce":
            return {**report, "samples": sum(event["samples"] for event in aux.events("epoch"))}
        samples = sum(event["samples"] for trainer in trainers for event in trainer.events("round"))
        lost = sum(len(trainer.events("exchange_lost")) for trainer in trainers)
        weights = {event["weight"] for trainer in trainers for event in trainer.events("met")}
        assert weights == set(SIZES), f"models are weighted by the sentences of their shards, not by {weights}"
        ended = sum(bool(trainer.events("converged")) for trainer in trainers)
        met = sum(len(trainer.events("met")) for trainer in trainers)
        more = {"distance": _distance(task, models), "drift": _drift(swarm.folder), "ended": ended, "met": met}
        return {**report, **more, "samples": samples, "lost": lost}


def _start(swarm: SwarmOfProcesses, number: int, folder: Path) -> PeerProcess:
    return swarm.trainer(
        f"peer-{number}",
        *("--batch-size", str(BATCH_SIZE), "--data-dir", str(folder), "--backup-every-step", "1000000"),
        env={"ACCOUNT": str(swarm.folder / f"account-{number}")},
        program=("-m", "benchmarks.arms.accounting_peer"),
    )


def _task(run: RunFolder, folder: Path) -> Task:
    settings = load_run_file(run.run_file)
    return load_task(settings.task, TaskContext(assets=collect_assets(settings.task, run.path), data_dir=folder))


def _values(trainer: PeerProcess) -> dict[str, torch.Tensor]:
    """The model that a trainer left with."""
    backup = read_backup(trainer.state_dir / "backup.collab", trainer.wait_for_last("joined")["run_id"])
    assert backup is not None, f"{trainer.state_dir.name} kept nothing"
    return {name.removeprefix("model/"): value for name, value in backup.tensors.items() if name.startswith("model/")}


def _loss(task: Task, values: dict[str, torch.Tensor]) -> float:
    torch.set_num_threads(1)  # two that wait for each other are slower on a busy machine
    model = task.build_model()
    model.load_state_dict(values, strict=False)
    return task.evaluate(model)


def _distance(task: Task, models: list[dict[str, torch.Tensor]]) -> float:
    """The largest squared distance of two models, beside twice that from the initial one: as in `collab status`."""
    initial = task.build_model().state_dict()
    flat = [torch.cat([(values[name] - initial[name]).double().flatten() for name in values]) for values in models]
    length2 = statistics.fmean(float(way.square().sum()) for way in flat)
    return max(float((one - other).square().sum()) for one in flat for other in flat) / (2 * length2)


def _drift(folder: Path) -> float:
    """What the exchanges of everyone did to the sum of all models, by weight, beside what they did to the models."""
    accounts = [torch.load(folder / f"account-{number}", weights_only=True) for number in range(len(SIZES))]
    total: torch.Tensor = sum(account["weight"] * account["received"] for account in accounts)
    moved: float = sum(account["weight"] * float(account["received"].norm()) for account in accounts)
    return float(total.norm()) / moved


def _excess(entries: list[Entry], record: Record) -> str:
    base = {entry["seed"]: entry["value"] for entry in record.entries_of(arm="allreduce")}
    excess = [100 * (entry["value"] / base[entry["seed"]] - 1) for entry in entries if entry["seed"] in base]
    text = f"{statistics.mean(excess):+.1f}"
    return f"{text} ({min(excess):+.1f} – {max(excess):+.1f})" if len(excess) > 1 else text


def _if_gossip(entries: list[Entry], key: str, form: str) -> str:
    return form.format(max(entry[key] for entry in entries)) if key in entries[0] else "–"


SUITE = Experiment(
    title=f"{len(SIZES)} peers with shards of their own: held-out loss",
    unit="nats per byte, lower is better",
    arms=("allreduce", "gossip", "converged"),
    measure=measure,
    has_times=False,
    columns={
        "held-out loss, mean of the peers": spread("value", "{:.4f}"),
        "% above allreduce": _excess,
        "of the worst peer": spread("worst", "{:.4f}"),
        "samples": spread("samples", "{:.0f}"),
        "largest distance": lambda entries, _: _if_gossip(entries, "distance", "{:.1e}"),
        "drift of the weighted mean": lambda entries, _: _if_gossip(entries, "drift", "{:.1e}"),
        "ended by themselves": lambda entries, _: _if_gossip(entries, "ended", "{:.0f} of 8"),
    },
)
