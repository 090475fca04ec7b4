"""The training loop. Every epoch is the same four moves: work, average, update, verify."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from collab_core.averaging.codecs import is_finite
from collab_core.errors import Code, ConfigError, TaskError
from collab_core.peer import Peer, PeerConfig
from collab_core.state.history import Standing
from collab_core.state.layout import Fragment, floating_buffers
from collab_core.swarm.record import told_loss
from collab_trainer.batches import Batches, StoppedWaiting, num_samples
from collab_trainer.data_journal import DataJournal
from collab_trainer.device import autocast
from collab_trainer.ladder import Ladder
from collab_trainer.pace import auto_steps, is_enough
from collab_trainer.task import Batch, Task
from collab_trainer.tuning import choose_batch
from collab_trainer.work import work_of

RATE_SMOOTHING = 0.2
MISSED_PAUSE_S = 0.05
MAX_ATTEMPTS = 3  # at a round, with work that can also wait for the next one
LISTEN_AFTER = 2  # missed epochs in a row before we only listen to a round: then others expect us in the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(PeerConfig):
    """A volunteer's own choices."""

    batch_size: int | None = None
    """Samples per forward and backward pass; None: as many as this machine is fastest with."""
    accumulate_batches: int = 1
    """Passes between two looks at what the swarm does."""
    num_workers: int = 0
    """Threads that prepare data."""


@dataclass(slots=True)
class Done:
    """What was done since the last round that took it."""

    num_samples: int = 0
    loss_sum: float = 0.0
    num_skipped: int = 0
    """Samples among them that a round failed to take: the next one does, but a share of new work comes first."""

    @property
    def num_fresh(self) -> int:
        return self.num_samples - self.num_skipped


@dataclass(frozen=True, slots=True)
class Brought:
    """What a trainer brings to an epoch."""

    contribution: torch.Tensor | None
    """Flat, on the CPU: what the update is made from, then buffers. None if there is nothing to bring."""
    num_samples: int


class Trainer(Peer):
    """A peer that computes."""

    config: TrainerConfig

    def __init__(
        self, *, task: Task, model: torch.nn.Module, device: torch.device, config: TrainerConfig, **peer: Any
    ) -> None:
        super().__init__(config=config, **peer)
        cap = self.settings.limits.max_samples_per_peer
        self.batch_size = config.batch_size or 1
        if self.batch_size * config.accumulate_batches > cap:
            raise ConfigError(
                Code.BAD_OPTION,
                f"--batch-size {self.batch_size} × --accumulate-batches {config.accumulate_batches} is more than the "
                f"run's limit of {cap} samples per peer and epoch.",
                fix="Choose a smaller batch size.",
            )
        self.task, self.device = task, device
        self._ladder = Ladder(device, self.events)
        self.model = model.to(device)
        self._constants = self._other_buffers()
        longest = max(piece.num_values for piece in self.replica.fragments)
        self._contribution = torch.zeros(longest)  # one for all epochs: fresh memory is slow
        self._work = work_of(self.settings, self.model, self.replica.layout)
        self._works_since = -1  # which of the states that replaced another our work began at
        self._done = Done()
        self._rate = 0.0
        self._num_missed = 0
        self._meanwhile = ThreadPoolExecutor(1, thread_name_prefix="collab-meanwhile")

    def enter(self) -> None:
        """Get ready to work, as long as nobody waits for us; then take up where we left off, or where others are."""
        journal = DataJournal(self.folder.data, self.manifest.run_id, self.events)
        self.batches = Batches(
            self.task, journal, batch_size=self.batch_size, num_workers=self.config.num_workers, stop=self.stop
        )
        if self.config.batch_size is None:
            self.batch_size, self._ladder.max_rows = choose_batch(
                self.task,
                self.model,
                self.batches.peek(),
                self.device,
                self.settings,
                self.config.accumulate_batches,
                self.events,
            )
            self.batches.batch_size = self.batch_size
        super().enter()

    def run(self) -> None:
        """Take part until stopped, or until the run is over; `enter` comes first."""
        try:
            with contextlib.suppress(StoppedWaiting):
                while not self.stop.is_set() and not self.is_done():
                    self.run_epoch()
        finally:
            self.batches.close()
            self.leave()
            self._meanwhile.shutdown()

    def run_epoch(self) -> None:
        """One epoch: the four moves."""
        if self.sits_out():
            self.catch_up("kept out of the rounds")
            return
        brought = self.work() if self._num_missed < LISTEN_AFTER else Brought(None, 0)
        average = self.average_and_work_on(brought) if brought is not None else None
        if average is None:
            self._miss()
            return
        self._num_missed = 0
        piece = self.replica.fragment
        self.update(average)
        self._go_on_from(piece)
        self.verify()

    def _go_on_from(self, piece: Fragment) -> None:
        """Take over what the round made of a piece. What nothing is left of does not count in the next one."""
        if self._work.accept(piece, self.replica.values):
            self._done = Done()

    def _miss(self) -> None:
        """No round took us along."""
        # listening for ever would be no better: if there was nobody to listen to, work again the next time
        is_listening = self._num_missed >= LISTEN_AFTER
        if not self._work.goes_on:
            self._num_missed = LISTEN_AFTER - 1 if is_listening else self._num_missed + 1
        self.stop.wait(MISSED_PAUSE_S)
        standing, epoch = self.holding.standing(), self.replica.epoch
        # what others may have taken from us already must not come a second time
        is_ours = self._work.goes_on and self._done.num_samples > 0 and not self.averager.is_in_doubt(epoch)
        start = self.replica.values.clone() if is_ours and standing is Standing.BEHIND else None
        self.catch_up(f"the swarm went on without us ({standing.value})")
        # what was begun before the last round about the same fragment is out of date
        if start is not None and 0 < self.replica.epoch - epoch <= len(self.replica.fragments):
            self._work.rebase(start, self.replica.values)
            self._works_since = self.replica.num_loads

    def work(self) -> Brought | None:
        """Work until the swarm has enough samples; None if it went on without us."""
        if self._works_since != self.replica.num_loads or not self._work.goes_on:
            self._works_since, self._done = self.replica.num_loads, Done()
            self._work.start_at(self.replica.values)
        self.swarm.publish(phase="working", epoch_samples=self._done.num_fresh, epoch_target=self._target())
        self.model.train()
        self._work.begin(self.replica.epoch)
        while not self.stop.is_set() and not self._should_average(self._done.num_fresh):
            if self.holding.standing() is not Standing.CURRENT:
                return None
            self._step()
            self.swarm.publish(epoch_samples=self._done.num_fresh, samples_per_second=self._rate, loss=self._loss())
        return self._collect()

    def _step(self) -> None:
        """One step of our own."""
        started = time.monotonic()
        batches = [next(self.batches) for _ in range(self.config.accumulate_batches)]
        while True:
            done = Done()
            if all(self._ladder.climb(batch, partial(self._pass, done=done)) for batch in batches):
                break
            if self._work.drop_step():
                self._done = Done()
        self._done.num_samples += done.num_samples
        self._done.loss_sum += done.loss_sum
        self._work.end_step()
        rate = self._step_samples / max(time.monotonic() - started, 1e-6)
        self._rate = rate if self._rate == 0 else (1 - RATE_SMOOTHING) * self._rate + RATE_SMOOTHING * rate

    def _pass(self, rows: Batch, done: Done) -> None:
        """Forward and backward."""
        with autocast(self.device):
            loss = self.task.loss(self.model, rows)
        size = num_samples(rows)
        self._work.took(loss, size, self._step_samples)
        done.num_samples += size
        done.loss_sum += float(loss.detach()) * size

    def average_and_work_on(self, brought: Brought) -> torch.Tensor | None:
        """The second move. Where the strategy allows it we go on meanwhile, for a bounded number of steps."""
        attempts = MAX_ATTEMPTS if self._work.goes_on else None
        overlap = self.settings.strategy.overlap_steps if brought.contribution is not None else 0
        taken, self._done = self._done, Done()
        if overlap:
            averaging = self._meanwhile.submit(
                self.average, brought.contribution, brought.num_samples, attempts=attempts
            )
            try:
                while overlap > 0 and not averaging.done() and not self.stop.is_set():
                    self._step()
                    overlap -= 1
            except BaseException:
                self.stop.set()  # it is over: the round should not be waited for
                raise
            average = averaging.result()
        else:
            average = self.average(brought.contribution, brought.num_samples, attempts=attempts)
        if average is None:  # nobody has it yet: it goes to the next round
            num_samples = taken.num_samples + self._done.num_samples
            self._done = Done(num_samples, taken.loss_sum + self._done.loss_sum, num_skipped=num_samples)
        return average

    def _should_average(self, num_samples: int) -> bool:
        """The swarm has its batch, or others have already gone to average it.

        Whatever others claim, we bring at least one batch of our own.
        """
        if num_samples == 0:
            return False
        epoch, root = self.replica.epoch, self.holding.root()
        trainers = [peer for peer in self.outlook.companions(epoch, root) if peer.record.role == "trainer"]
        others = [peer for peer in trainers if peer.record.root == root]  # the rest still tell of the last epoch
        if is_enough(self.settings, num_samples, self._target(), others):
            return True
        if num_samples + self._step_samples > self.settings.limits.max_samples_per_peer:
            return True
        is_averaging = any(peer.record.phase == "averaging" for peer in others)
        return is_averaging or self.averager.is_awaited(epoch, root)

    @property
    def _step_samples(self) -> int:
        return self.batch_size * self.config.accumulate_batches

    def _target(self) -> int:
        """Samples that we mean to bring to this epoch, where that is for every trainer to choose."""
        strategy, epoch = self.settings.strategy, self.replica.epoch
        if strategy.name != "diloco":
            return 0
        steps, num_fragments = strategy.local_steps, len(self.replica.fragments)
        if steps == "auto":
            round_s = self.outcome.reducing_s if self.outcome is not None else 0.0
            step_s = self._step_samples / self._rate if self._rate else 0.0
            size, link = self.averager.round_bytes(epoch), self.averager.bandwidth
            overlap = strategy.overlap_steps
            steps = auto_steps(size, link, round_s, step_s, overlap_steps=overlap, num_fragments=num_fragments)
        per_epoch = max(1, steps // num_fragments)
        return min(per_epoch * self._step_samples, self.settings.limits.max_samples_per_peer)

    def _loss(self) -> float | None:
        return told_loss(self._done.loss_sum / self._done.num_samples)

    @torch.no_grad()
    def _collect(self) -> Brought:
        num_samples = self._done.num_samples
        if num_samples == 0:
            return Brought(None, 0)
        self._check_other_buffers()
        piece = self.replica.fragment
        contribution = self._contribution[: piece.num_values]
        self._work.collect(piece, self.replica.values, num_samples, contribution)
        if not is_finite(contribution):
            self.events.write("gradient_dropped", epoch=self.replica.epoch, reason="it is not finite")
            # whatever it remembers, and the model itself, may not be finite either
            self._work, self._works_since = work_of(self.settings, self.model, self.replica.layout), -1
            return Brought(None, 0)
        self.holding.loss = self._loss()
        # steps taken while a round failed come on top of a full load, and nobody may weigh more than the run allows
        return Brought(contribution, min(num_samples, self.settings.limits.max_samples_per_peer))

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
