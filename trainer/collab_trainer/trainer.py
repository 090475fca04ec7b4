"""The training loop. Every epoch is the same four moves: work, average, update, verify."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from collab_core.errors import Code, ConfigError, TaskError
from collab_core.peer import Peer, PeerConfig
from collab_core.state.history import Standing
from collab_core.state.layout import floating_buffers
from collab_core.swarm import Peer as SwarmPeer
from collab_trainer.batches import Batches
from collab_trainer.data_journal import DataJournal
from collab_trainer.device import autocast
from collab_trainer.task import Task

RATE_SMOOTHING = 0.2
RECORD_AGE_S = 0.25  # how old a record is when it arrives, about: it is told and read a few times per second
FORESIGHT_S = 1.0  # how far a record is thought on
MAX_LIKELY = 0.25  # how much of a batch may be a guess
LISTEN_AFTER = 2  # missed epochs in a row before we only listen to a round: then others expect us in the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(PeerConfig):
    """A volunteer's own choices."""

    batch_size: int = 32
    """Samples per forward and backward pass."""
    accumulate_batches: int = 1
    """Passes between two looks at what the swarm does."""
    num_workers: int = 0
    """Threads that prepare data."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a trainer brings to an epoch."""

    contribution: torch.Tensor | None
    """Mean gradient, then buffers; flat, on the CPU. None if there is nothing to bring."""
    num_samples: int


class Trainer(Peer):
    """A peer that computes gradients."""

    config: TrainerConfig

    def __init__(
        self, *, task: Task, model: torch.nn.Module, device: torch.device, config: TrainerConfig, **peer: Any
    ) -> None:
        super().__init__(config=config, **peer)
        cap = self.settings.limits.max_samples_per_peer
        if config.batch_size * config.accumulate_batches > cap:
            raise ConfigError(
                Code.BAD_OPTION,
                f"--batch-size {config.batch_size} × --accumulate-batches {config.accumulate_batches} is more than the "
                f"run's limit of {cap} samples per peer and epoch.",
                fix="Choose a smaller batch size.",
            )
        self.task, self.device = task, device
        self.model = model.to(device)
        self._constants = self._other_buffers()
        self._contribution = torch.zeros(self.replica.layout.num_values)  # one for all epochs: fresh memory is slow
        self._rate = 0.0
        self._num_missed = 0

    def run(self) -> None:
        """Take part until stopped, or until the run is over; `enter` comes first."""
        journal = DataJournal(self.folder.data, self.manifest.run_id, self.events)
        config = self.config
        self.batches = Batches(self.task, journal, batch_size=config.batch_size, num_workers=config.num_workers)
        try:
            while not self.stop.is_set() and not self.is_done():
                self.run_epoch()
        finally:
            self.batches.close()
            self.leave()

    def run_epoch(self) -> None:
        """One epoch: the four moves."""
        work = self.work() if self._num_missed < LISTEN_AFTER else Work(None, 0)
        average = self.average(work.contribution, work.num_samples) if work is not None else None
        if average is None:
            self._num_missed += 1
            self.catch_up(f"the swarm went on without us ({self.holding.standing().value})")
            return
        self._num_missed = 0
        self.update(average)
        self.verify()

    def work(self) -> Work | None:
        """Collect gradients until the swarm has enough samples; None if it went on without us."""
        self.swarm.publish(phase="working", epoch_samples=0)
        self.replica.layout.write(self.model, self.replica.values)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        num_samples, loss_sum = 0, 0.0
        while not self.stop.is_set() and not self._should_average(num_samples):
            if self.holding.standing() is not Standing.CURRENT:
                return None
            started = time.monotonic()
            for _ in range(self.config.accumulate_batches):
                batch = {name: rows.to(self.device) for name, rows in next(self.batches).items()}
                with autocast(self.device):
                    loss = self.task.loss(self.model, batch)
                (loss * self.config.batch_size).backward()  # type: ignore[no-untyped-call]
                num_samples += self.config.batch_size
                loss_sum += float(loss.detach()) * self.config.batch_size
            self._report(num_samples, loss_sum / num_samples, time.monotonic() - started)
        return self._collect(num_samples, loss_sum)

    def _should_average(self, num_samples: int) -> bool:
        """The swarm has its batch, or others have already gone to average it.

        Whatever others claim, we bring at least one batch of our own.
        """
        if num_samples == 0:
            return False
        epoch, root = self.replica.epoch, self.holding.root()
        trainers = [peer for peer in self.outlook.companions(epoch, root) if peer.record.role == "trainer"]
        others = [peer for peer in trainers if peer.record.root == root]  # the rest still tell of the last epoch
        cap = self.settings.limits.max_samples_per_peer
        target = self.settings.strategy.target_batch_size
        told = sum(min(peer.record.epoch_samples, cap) for peer in others)
        likely = sum(min(_samples_since(peer), cap) for peer in others)
        if num_samples + told + min(likely, MAX_LIKELY * target) >= target:
            return True
        step = self.config.batch_size * self.config.accumulate_batches
        if num_samples + step > cap:
            return True
        is_averaging = any(peer.record.phase == "averaging" for peer in others)
        return is_averaging or self.averager.is_awaited(epoch, root)

    def _report(self, num_samples: int, loss: float, seconds: float) -> None:
        rate = self.config.batch_size * self.config.accumulate_batches / max(seconds, 1e-6)
        self._rate = rate if self._rate == 0 else (1 - RATE_SMOOTHING) * self._rate + RATE_SMOOTHING * rate
        shown = loss if torch.isfinite(torch.tensor(loss)) else None
        self.swarm.publish(epoch_samples=num_samples, samples_per_second=self._rate, loss=shown)

    @torch.no_grad()
    def _collect(self, num_samples: int, loss_sum: float) -> Work:
        if num_samples == 0:
            return Work(None, 0)
        self._check_other_buffers()
        layout = self.replica.layout
        contribution = self._contribution.zero_()
        values = {**{n: p.grad for n, p in self.model.named_parameters()}, **floating_buffers(self.model)}
        for name, view in layout.views(contribution).items():
            if (value := values[name]) is not None:
                view.copy_(value)
        contribution[: layout.num_params] /= num_samples
        if not bool(torch.isfinite(contribution).all()):
            self.events.write("gradient_dropped", epoch=self.replica.epoch, reason="it is not finite")
            return Work(None, 0)
        self.holding.loss = loss_sum / num_samples
        return Work(contribution, num_samples)

    def _other_buffers(self) -> dict[str, torch.Tensor]:
        floating = floating_buffers(self.model)
        kept = self.model.state_dict()
        return {name: kept[name].clone() for name, _ in self.model.named_buffers() if name in kept.keys() - floating}

    def _check_other_buffers(self) -> None:
        """Counters and the like do not travel, so they must not change: replicas would differ unseen."""
        now = self._other_buffers()
        for name, before in self._constants.items():
            if not torch.equal(before, now[name]):
                raise TaskError(
                    Code.UNSUPPORTED_MODEL,
                    f"The buffer {name} ({str(before.dtype).removeprefix('torch.')}) changes during training.",
                    fix="Use a layer without it (for BatchNorm: track_running_stats=False), or make it floating point.",
                )


def _samples_since(peer: SwarmPeer) -> float:
    """What a peer has probably done since it told: records are some tenths of a second old."""
    if peer.record.phase != "working":
        return 0.0
    return peer.record.samples_per_second * min(time.monotonic() - peer.changed + RECORD_AGE_S, FORESIGHT_S)
