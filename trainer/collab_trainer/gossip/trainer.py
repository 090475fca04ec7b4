"""The training loop of a gossip run: work, average with one partner, update, verify; until most see that it is over."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from collab_core.averaging.averager import MIN_BYTES_PER_SECOND
from collab_core.averaging.group import MAX_RATE
from collab_core.gossip import (
    Change,
    Faults,
    Journal,
    Keeping,
    Kept,
    Meetings,
    Neighbours,
    Outcome,
    Terms,
)
from collab_core.session import Session
from collab_core.state.replica import Replica
from collab_core.swarm.record import told_loss
from collab_trainer.batches import Batches, StoppedWaiting
from collab_trainer.batches import num_samples as count_rows
from collab_trainer.data_journal import DataJournal
from collab_trainer.device import autocast
from collab_trainer.gossip.adoption import PAUSE_S, adopt
from collab_trainer.gossip.held_out import HeldOut
from collab_trainer.gossip.own_model import OwnModel
from collab_trainer.gossip.verdict import Verdict
from collab_trainer.initial import model_files
from collab_trainer.ladder import Ladder
from collab_trainer.task import Batch, Task, dataset_size
from collab_trainer.trainer import RATE_SMOOTHING, TrainerConfig
from collab_trainer.tuning import choose_batch

NUM_PARTNERS = 2  # one, and another one if the first is busy
ATTENDING_S = 0.02  # between two looks at who waits, while we do nothing else
ARCHIVING_S = 2.0  # if a person waits for us to leave
NUM_WAITS = 3  # for those who come to the end last, in matchmaking times


class GossipTrainer:
    """A peer with a model of its own. No leader, no group: it needs one other peer at a time, and not always the same.

    Args:
        task: what is trained.
        model: new, on the CPU.
        replica: the run's initial state; only its values are of use here.
        device: where to compute.
        session: our place in the run.
        config: the volunteer's own choices.
        stop: asks us to leave.
        fail_at: for tests.
    """

    def __init__(
        self,
        *,
        task: Task,
        model: torch.nn.Module,
        replica: Replica,
        device: torch.device,
        session: Session,
        config: TrainerConfig,
        stop: threading.Event,
        fail_at: Faults | None = None,
    ) -> None:
        self.task, self.device, self.config, self.stop = task, device, config, stop
        self._session = session
        session.exchange.throttle.bytes_per_second = config.max_upload
        self.swarm, self.events, self.folder = session.swarm, session.events, session.folder
        self.manifest, self.settings = session.manifest, session.manifest.settings
        self.batch_size = config.batch_size or 1
        self._ladder = Ladder(device, self.events)
        self.own = OwnModel(model.to(device), replica.layout, self.settings.optimizer, self.events)
        self.neighbours = Neighbours(self.swarm)
        self.contribution = session.contribution
        self.loss: float | None = None
        self._root = replica.freeze().root
        self.verdict = Verdict(self.settings, self.neighbours, self.manifest.run_hash, replica.values)
        self._keeping = Keeping(session, replica.layout, model_files(model, session.assets))
        self._held_out = HeldOut(task, self.settings, self.events)
        self._fail_at = fail_at
        self._num_samples, self._rate = 0, 0.0
        self._was_met = False
        self._met_at_the_end: list[str] = []  # then everyone in turn: to meet one twice in a row helps nobody
        self._num_rounds = 0
        """What is due every so many rounds goes by ours: a meeting may take us over the one in which it would be."""
        self._round_started = time.monotonic()

    @property
    def epoch(self) -> int:
        """The rounds that are behind our own model."""
        return self.own.epoch

    # --- coming and going ---

    def enter(self) -> None:
        """Get ready to work; then take up our own model where we left it, or somebody else's."""
        data = DataJournal(self.folder.data, self.manifest.run_id, self.events)
        self.batches = Batches(
            self.task, data, batch_size=self.batch_size, num_workers=self.config.num_workers, stop=self.stop
        )
        if self.config.batch_size is None:
            self.batch_size, self._ladder.max_rows = choose_batch(
                self.task,
                self.own.model,
                self.batches.peek(),
                self.device,
                self.settings,
                self.config.accumulate_batches,
                self.events,
            )
            self.batches.batch_size = self.batch_size
        kept = self._keeping.restore()
        if kept is not None:
            self.own.become(kept.values, kept.epoch)
            self.contribution.remember(kept.samples)
        journal = Journal(self.folder.exchanges, self.manifest.run_id)
        exchanges = kept.exchanges if kept is not None else ()
        self.meetings = Meetings(
            self.swarm,
            self._terms(),
            journal,
            kept=exchanges,
            throttle=self._session.exchange.throttle,
            faults=self._fail_at,
        )
        self.meetings.epoch = self._num_rounds = self.own.epoch
        self.meetings.tell_lost()
        self.swarm.look_around(lambda: len(self.neighbours) > 0, self.stop)
        if kept is None:
            self._begin_with_others()
        if (link := self.config.bandwidth) is not None:
            self.swarm.publish(upload=min(link.upload, MAX_RATE), download=min(link.download, MAX_RATE))
        self._publish()
        self._session.tell_joined(self.own.epoch, root=None)

    def _terms(self) -> Terms:
        timeout_s, cap = self.settings.strategy.averaging_timeout_s, float(self.settings.limits.max_samples_per_peer)
        num_values = self.own.layout.num_values
        return Terms(
            layout=self.own.layout.hash,
            num_values=num_values,
            weight=min(float(dataset_size(self.task) or 1), cap),
            weight_cap=cap,
            patience_s=timeout_s,
            transfer_s=timeout_s + 4 * num_values / MIN_BYTES_PER_SECOND,
        )

    def _begin_with_others(self) -> None:
        has_initial = self._root == self.manifest.initial_root
        if not has_initial:
            self.events.write("initial_state_differs", root=self._root, pinned=self.manifest.initial_root)
        adopted = adopt(self.swarm, self.neighbours, self.meetings, is_needed=not has_initial, stop=self.stop)
        if adopted is not None:
            self.own.become(adopted.values, adopted.epoch)

    def run(self) -> None:
        """Take part until stopped, or until the run is over; `enter` comes first."""
        try:
            with contextlib.suppress(StoppedWaiting):
                is_over = False
                while not (self.stop.is_set() or self.is_done() or is_over):
                    is_over = self.run_round()
                if is_over or self.is_run_over():
                    self.end()
        finally:
            self.batches.close()
            self.leave()

    def is_done(self) -> bool:
        """Whether we have reached our last round: the run's, or the one that was enough for whoever started us."""
        return self.is_run_over() or 0 < self.config.max_epochs <= self.own.epoch

    def is_run_over(self) -> bool:
        """Whether the run ends with the round that we have reached."""
        return 0 < self.settings.limits.max_epochs <= self.own.epoch

    def leave(self) -> None:
        """Settle what is under way, and keep what we have."""
        self.meetings.finish()
        self.update()
        kept = self._kept()
        has_trained = kept.epoch > 0  # otherwise we come as a newcomer the next time too
        if self.config.backup_every and has_trained:
            self._keeping.back_up(kept)
        self._keeping.close()
        if self.settings.checkpoints.every and has_trained:
            self._keeping.archive(kept, ARCHIVING_S if self.stop.is_set() else None)
        self.contribution.save()
        now, total = self.contribution.now, self.contribution.total
        self.events.write(
            "left",
            role=self.swarm.config.role,
            epoch=kept.epoch,
            root=None,
            samples=total.samples,
            epochs=total.epochs,
            seconds=total.seconds,
            samples_now=now.samples,
            epochs_now=now.epochs,
            loss=self.loss,
        )

    # --- a round ---

    def run_round(self) -> bool:
        """One round: the four moves. Whether the run is over."""
        self.work()
        self.average()
        self.update()
        return self.verify()

    def work(self) -> None:
        """Train our own model for some steps; between two of them, be there for those who want to meet us."""
        self.swarm.check_alive()
        self.swarm.publish(phase="working", epoch_samples=0)
        self.own.begin()
        self._was_met = False
        num_samples, loss_sum = 0, 0.0
        while num_samples < self.settings.strategy.target_batch_size and not self.stop.is_set():
            if self.verdict.is_ending_elsewhere:
                break
            started = time.monotonic()
            loss_sum += self._step()
            num_samples += self._step_samples
            self._report(num_samples, loss_sum / num_samples, time.monotonic() - started)
            self.attend()
        self.contribution.add(num_samples)
        self._num_samples = num_samples

    def _step(self) -> float:
        """One step of our own; returns the sum of its samples' losses."""
        batches = [next(self.batches) for _ in range(self.config.accumulate_batches)]
        while True:
            losses: list[float] = []
            if all(self._ladder.climb(batch, partial(self._pass, losses=losses)) for batch in batches):
                break
            self.own.steps.drop_step()
        self.own.steps.end_step()
        return sum(losses)

    def _pass(self, rows: Batch, losses: list[float]) -> None:
        with autocast(self.device):
            loss = self.task.loss(self.own.model, rows)
        size = count_rows(rows)
        self.own.steps.took(loss, size, self._step_samples)
        losses.append(float(loss.detach()) * size)

    @property
    def _step_samples(self) -> int:
        return self.batch_size * self.config.accumulate_batches

    def average(self) -> None:
        """Meet one partner, unless somebody met us meanwhile. If it is busy, another one is asked, once."""
        values = self.own.values()
        self.verdict.bring(values)
        if self._was_met or self.stop.is_set():
            return
        self.swarm.publish(phase="averaging")
        for partner in self.neighbours.partners(NUM_PARTNERS, self._met_at_the_end):
            outcome = self.meetings.meet(partner, values, self.stop)
            if outcome in (Outcome.MET, Outcome.IN_DOUBT) or self.meetings.is_engaged:
                return

    def update(self) -> None:
        """The averages that were decided, in place of what we brought; what we learnt since stays."""
        for change in self.meetings.changes():
            self._was_met = True
            self.own.take(change)
            self._tell_met(change)
            if self.verdict.stage == "training":
                self.own.move(change.rounds, self.settings.limits.max_epochs)
                self.meetings.epoch = self.own.epoch
            else:
                self._met_at_the_end.append(change.partner)

    def verify(self) -> bool:
        """How far we are from the others, told to everyone. Whether most say that the run is over."""
        if self.stop.is_set():  # in the middle of a round, which does not count then
            return False
        is_training = self.verdict.stage == "training"
        self.own.epoch += is_training
        self._num_rounds += 1
        held_out = None
        if is_training and self._held_out.is_due(self._num_rounds):
            held_out = self._held_out.measure(self.own.model, self.own.epoch, self.loss)
        is_over = self.verdict.observe(held_out)
        self._publish()
        now = time.monotonic()
        seconds, self._round_started = now - self._round_started, now
        self.events.write(
            "round",
            epoch=self.own.epoch,
            samples=self._num_samples,
            loss=self.loss,
            distance=self.verdict.distance,
            is_for_end=self.verdict.is_for_end,
            seconds=round(seconds, 3),
        )
        if self.config.backup_every and self._num_rounds % self.config.backup_every == 0:
            self._keeping.back_up(self._kept())
        return is_over

    def attend(self) -> None:
        """Between two steps: take what was decided, and give our model to whoever waits for it."""
        self.update()
        if self.meetings.is_waiting:
            self.meetings.hand_out(self.own.values())

    # --- the end of the run ---

    def end(self) -> None:
        """Meet some more without training, so that all of us end with nearly the same model."""
        has_converged = self.verdict.can_end and not self.is_run_over()
        rounds = self.verdict.begin_to_end()
        self.meetings.is_training = False
        if not has_converged:  # most have made the last round, and give us the model of it
            self.own.epoch = max(self.own.epoch, self.settings.limits.max_epochs)
        self._num_samples = 0
        self._publish()
        for _ in range(rounds):
            self._meet_somebody()
            self.verify()
        self.verdict.stage = "done"
        self._publish()
        patience_s = NUM_WAITS * self.settings.strategy.matchmaking_time_s
        self._attend_while(self.neighbours.is_anyone_unfinished, patience_s)
        if has_converged and not self.stop.is_set():
            self.events.write(
                "converged", epoch=self.own.epoch, distance=self.verdict.distance, peers=len(self.neighbours) + 1
            )

    def _meet_somebody(self) -> None:
        self._was_met = False
        deadline = time.monotonic() + self.settings.strategy.matchmaking_time_s
        while not self._was_met and len(self.neighbours) and time.monotonic() < deadline and not self.stop.is_set():
            self.average()
            self.update()
            self._attend_while(lambda: not self._was_met, random.uniform(0, PAUSE_S))

    def _attend_while(self, condition: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while condition() and time.monotonic() < deadline and not self.stop.is_set():
            self.attend()
            self.stop.wait(ATTENDING_S)

    # --- what we tell, and keep ---

    def _report(self, num_samples: int, loss: float, seconds: float) -> None:
        rate = self._step_samples / max(seconds, 1e-6)
        self._rate = rate if self._rate == 0 else (1 - RATE_SMOOTHING) * self._rate + RATE_SMOOTHING * rate
        self.loss = told_loss(loss)
        self.swarm.publish(epoch_samples=num_samples, samples_per_second=self._rate, loss=self.loss)

    def _publish(self) -> None:
        self.meetings.epoch = self.own.epoch
        self.swarm.publish(
            phase="working",
            epoch=self.own.epoch,
            epoch_samples=0,
            samples=self.contribution.total.samples,
            epochs=self.contribution.total.epochs,
            seconds=self.contribution.total.seconds,
            loss=self.loss,
            gossip=self.verdict.note(),
        )

    def _tell_met(self, change: Change) -> None:
        self.events.write(
            "met",
            epoch=self.own.epoch,
            exchange=change.exchange,
            peer_id=change.partner,
            name=self.swarm.name_of(change.partner),
            weight=change.partner_weight,
            has_asked=change.is_asker,
            seconds=round(change.seconds, 3),
            bytes_sent=change.bytes_sent,
            bytes_received=change.bytes_received,
        )

    def _kept(self) -> Kept:
        return Kept(
            values=self.own.values(),
            epoch=self.own.epoch,
            exchanges=self.meetings.kept,
            samples=self.contribution.total.samples,
            loss=self.loss,
        )
