"""Train one arm, peers in turn on one core, and note how the held-out loss falls and what was sent."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.losses.arms import BATCH_SIZE, NUM_PEERS, Arm
from benchmarks.losses.table import Table
from benchmarks.losses.text import batches, make_task
from benchmarks.record import Entry
from collab_core.gossip import Change
from collab_core.gossip.mean import Share, weighted_mean
from collab_core.run.settings import RunSettings
from collab_core.state.layout import Layout
from collab_core.state.replica import NO_PARENT
from collab_core.telemetry import EventLog
from collab_trainer import new_replica
from collab_trainer.gossip.own_model import OwnModel
from collab_trainer.task import Batch
from collab_trainer.tiny_gpt import TinyGPT
from collab_trainer.work import LocalSteps, Work, work_of

EVALUATE_EVERY = 50  # steps, or when the next round is done
LAST_MEETINGS = 6  # 3 · log₂ of 4 peers: what a gossip run does without training before it ends

Average = Callable[[int, Sequence[torch.Tensor]], torch.Tensor]


@dataclass
class Curve:
    """Held-out loss over the steps of a peer, and the bytes that a peer has sent by then."""

    task: TinyGPT
    points: list[tuple[int, float, float]] = field(default_factory=list)

    def note(self, step: int, model: torch.nn.Module, num_bytes: float, *, is_last: bool = False) -> None:
        if is_last or step - (self.points[-1][0] if self.points else 0) >= EVALUATE_EVERY:
            self.points.append((step, self.task.evaluate(model), num_bytes))


@dataclass
class Peer:
    """One trainer's model, data and way of working."""

    task: TinyGPT
    model: torch.nn.Module
    work: Work
    data: Iterator[Batch]

    def steps(self, count: int) -> None:
        self.model.train()
        for _ in range(count):
            loss = self.task.loss(self.model, next(self.data))
            self.work.took(loss, BATCH_SIZE, BATCH_SIZE)
            self.work.end_step()


def train(arm: Arm, data: str, seed: int) -> Entry:
    """Everything about one training: the curve, and the CPU seconds."""
    torch.set_num_threads(1)
    started = time.process_time()
    curve = Curve(make_task(data, seed))
    runs = {"alone": _ddp, "ddp": _ddp, "fedavg": _fedavg, "gossip": _gossip}
    runs.get(arm.kind, _rounds)(arm, curve, seed)
    steps, losses, sent = zip(*curve.points, strict=True)
    return {"steps": steps, "losses": losses, "sent": sent, "cpu_seconds": time.process_time() - started}


def _peers(arm: Arm, curve: Curve, seed: int, make_work: Callable[[torch.nn.Module], Work]) -> list[Peer]:
    models = [curve.task.build_model() for _ in range(NUM_PEERS)]
    return [
        Peer(curve.task, model, make_work(model), batches(curve.task, seed, rank, BATCH_SIZE))
        for rank, model in enumerate(models)
    ]


def _rounds(arm: Arm, curve: Curve, seed: int) -> None:
    """`allreduce` and `diloco`: our own four moves, less the last. Also hivemind's, which only averages differently."""
    settings = arm.settings()
    shown = curve.task.build_model()
    replica = new_replica(settings, shown)
    table = Table(settings, [piece.num_values for piece in replica.fragments], [str(rank) for rank in range(NUM_PEERS)])
    peers = _peers(arm, curve, seed, lambda model: work_of(settings, model, replica.layout))
    num_epochs, taken = arm.num_steps // arm.steps_per_epoch, 0
    for epoch in range(num_epochs):
        piece = replica.fragment
        contributions = [torch.empty(piece.num_values) for _ in peers]
        num_samples = arm.steps_per_epoch * BATCH_SIZE
        for peer, contribution in zip(peers, contributions, strict=True):
            if epoch == 0 or not peer.work.goes_on:
                peer.work.start_at(replica.values)
            peer.work.begin(epoch)
            peer.steps(arm.steps_per_epoch - taken)
            peer.work.collect(piece, replica.values, num_samples, contribution)
        averages = (
            _mean_of_halves(contributions)
            if arm.kind == "hivemind"
            else table.round(epoch, contributions, [float(num_samples)] * NUM_PEERS)
        )
        assert all(torch.equal(averages[0], average) for average in averages), "replicas would differ"
        taken = arm.overlap if epoch + 1 < num_epochs else 0
        for peer in peers:
            peer.steps(taken)
        replica.update(averages[0], NO_PARENT)
        table.give_back(averages)
        for peer in peers:
            peer.work.accept(piece, replica.values)
        replica.layout.write(shown, replica.values)
        step = (epoch + 1) * arm.steps_per_epoch
        sent = table.bytes_sent / NUM_PEERS if arm.kind != "hivemind" else ring_bytes(piece.num_values, 2) * step
        curve.note(step, shown, sent, is_last=epoch + 1 == num_epochs)
    table.close()


def ring_bytes(num_values: int, bytes_per_value: float) -> float:
    """What a peer sends in an all-reduce in which every peer reduces the same share."""
    return 2 * num_values * bytes_per_value * (NUM_PEERS - 1) / NUM_PEERS


def _mean_of_halves(contributions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """hivemind.Optimizer with fp16 gradients: what is lost is lost."""
    total = sum((contribution.half().float() for contribution in contributions), torch.zeros_like(contributions[0]))
    return [(total / len(contributions)).half().float() for _ in contributions]


def _ddp(arm: Arm, curve: Curve, seed: int) -> None:
    """torch's AdamW on the mean gradient of all peers in float32; of one, if it is alone."""
    model = curve.task.build_model()
    layout = Layout.of(model)
    work = LocalSteps(model, layout, arm.settings().optimizer)
    ranks = range(1 if arm.kind == "alone" else NUM_PEERS)
    data = [batches(curve.task, seed, rank, BATCH_SIZE) for rank in ranks]
    per_step = ring_bytes(layout.num_values, 4) if len(data) > 1 else 0.0
    for step in range(arm.num_steps):
        work.begin(step)
        # the mean of losses of equal batches is the loss of all of them, and one pass is quicker than four
        batch = {"tokens": torch.cat([next(own)["tokens"] for own in data])}
        num_samples = len(batch["tokens"])
        work.took(curve.task.loss(model, batch), num_samples, num_samples)
        work.end_step()
        curve.note(step + 1, model, per_step * (step + 1), is_last=step + 1 == arm.num_steps)


def _fedavg(arm: Arm, curve: Curve, seed: int) -> None:
    """Flower's FedAvg: the server's model is the mean of the clients', weighted by samples, which are equal here.

    Kinder than Flower's examples: clients keep their optimizer's moments between rounds.
    """
    shown = curve.task.build_model()
    layout = Layout.of(shown)
    settings = arm.settings().optimizer
    peers = _peers(arm, curve, seed, lambda model: LocalSteps(model, layout, settings))
    for number in range(arm.num_steps // arm.local_steps):
        for peer in peers:
            peer.work.begin(number)
            peer.steps(arm.local_steps)
        mean = torch.stack([layout.read(peer.model) for peer in peers]).mean(0)
        for peer in peers:
            peer.work.start_at(mean)
        layout.write(shown, mean)
        step = (number + 1) * arm.local_steps
        curve.note(step, shown, 4.0 * layout.num_values * (number + 1), is_last=step == arm.num_steps)


def _gossip(arm: Arm, curve: Curve, seed: int) -> None:
    """Everyone has a model of its own and, after every round of work, meets one partner, unless somebody met it."""
    settings: RunSettings = arm.settings()
    models = [curve.task.build_model() for _ in range(NUM_PEERS)]
    layout = Layout.of(models[0])
    data = [batches(curve.task, seed, rank, BATCH_SIZE) for rank in range(NUM_PEERS)]
    draw = random.Random(seed)
    num_meetings = 0

    def meet(one: int, other: int) -> None:
        shares = [Share(str(rank), owns[rank].values(), 1.0) for rank in (one, other)]
        mean = weighted_mean(*shares)
        for rank, partner, share in ((one, other, shares[0]), (other, one, shares[1])):
            change = Change(
                exchange=str(num_meetings),
                partner=str(partner),
                epoch=owns[rank].epoch,
                rounds=0,
                is_asker=rank == one,
                old=share.values,
                average=mean,
                partner_weight=1.0,
                seconds=0.0,
                bytes_sent=0,
                bytes_received=0,
            )
            owns[rank].take(change)

    with tempfile.TemporaryDirectory(prefix="collab-loss-") as folder:
        owns = [OwnModel(model, layout, settings.optimizer, EventLog(Path(folder) / "events")) for model in models]
        num_rounds = arm.num_steps // arm.local_steps
        for number in range(num_rounds + LAST_MEETINGS):
            is_training = number < num_rounds
            for own, stream in zip(owns, data, strict=True):
                own.epoch = min(number, num_rounds)
                own.begin()
                Peer(curve.task, own.model, own.steps, stream).steps(arm.local_steps if is_training else 0)
            was_met: set[int] = set()
            for rank in draw.sample(range(NUM_PEERS), NUM_PEERS):
                if rank not in was_met:
                    partner = draw.choice([other for other in range(NUM_PEERS) if other != rank])
                    meet(rank, partner)
                    was_met |= {rank, partner}
                    num_meetings += 1
            step = min(number + 1, num_rounds) * arm.local_steps
            sent = 2 * num_meetings / NUM_PEERS * 4.0 * layout.num_values
            curve.note(step, models[0], sent, is_last=number + 1 == num_rounds + LAST_MEETINGS)
