"""What trainers and auxiliaries have in common: coming, going, and the moves average, update and verify."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from collab_core.averaging.averager import ExactAverager
from collab_core.averaging.faults import FailAt
from collab_core.averaging.group import MAX_RATE
from collab_core.averaging.link import Bandwidth
from collab_core.averaging.round import RoundOutcome, RoundRequest
from collab_core.holding import Holding
from collab_core.outlook import Outlook
from collab_core.session import Session
from collab_core.state.history import Standing
from collab_core.state.replica import Replica

logger = logging.getLogger(__name__)

NEWS_PAUSE_S = 0.3
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.2, 2.0  # a failed round is tried again soon, then less and less so
NOBODY_PAUSE_S = 0.2
LEAVING_S = 3.0
SITTING_OUT_S = 2.0  # between two looks whether we are still kept out


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerConfig:
    """A peer's own choices, whatever its role."""

    backup_every: int = 10
    """Epochs between backups; 0 keeps none."""
    max_epochs: int = 0
    """Leave when the run has reached this epoch; 0 stays."""
    bandwidth: Bandwidth | None = None
    """What the link carries; None measures it."""
    max_upload: float = 0.0
    """Bytes per second that we give to those who fetch the state, and that our share of a round fits; 0: no limit."""
    is_active: bool = True
    """Holds state and applies every update. Only an auxiliary may say no."""


class Peer:
    """One replica in the swarm. Subclasses do the work; this class keeps the replica equal to everyone else's."""

    def __init__(
        self,
        *,
        session: Session,
        replica: Replica,
        config: PeerConfig,
        stop: threading.Event,
        fail_at: FailAt | None = None,
    ) -> None:
        self._session = session
        self.swarm, self.manifest = session.swarm, session.manifest
        self.folder, self.events = session.folder, session.events
        self.config, self.stop = config, stop
        self.settings = self.manifest.settings
        self.outcome: RoundOutcome | None = None
        session.exchange.throttle.bytes_per_second = config.max_upload
        self.outlook = Outlook(self.swarm, self.manifest)
        self.swarm.rank, self.swarm.seconds_left = self.outlook.rank, self.outlook.seconds_left
        self.averager = ExactAverager(
            self.swarm,
            self.settings,
            layout_hash=replica.layout.hash,
            lengths=[piece.num_values for piece in replica.fragments],
            bandwidth=config.bandwidth,
            max_upload=config.max_upload,
            fail_at=fail_at,
            quarantine=self.outlook.quarantine,
        )
        self.averager.restore_feedback(self.folder.feedback)
        self.holding = Holding(
            session,
            replica,
            self.outlook,
            backup_every=config.backup_every,
            on_change=self.averager.set_epoch,
            stop=stop,
        )
        self.replica = replica
        self._is_waiting = False
        self._epoch_started = time.monotonic()

    @property
    def epoch(self) -> int:
        """Of the model we have; it may not be verified yet."""
        return self.replica.epoch

    # --- coming and going ---

    def enter(self) -> None:
        """Take up where we left off, or where the others are."""
        if not self.config.is_active:
            self.swarm.publish(phase="serving")
            self._session.tell_joined(0, None)
            return
        self.holding.begin()
        self.swarm.look_around(lambda: bool(self.outlook.others()), self.stop)
        self.holding.announce()
        self.catch_up("joining")
        if root := self.holding.root_if_any():  # otherwise we were stopped before we had anything
            self._session.tell_joined(self.replica.epoch, root)

    def leave(self) -> None:
        """Keep what we have, and let others finish what they need from us."""
        self.averager.finish(LEAVING_S)
        holding = self.holding
        holding.save()
        self._keep_feedback()
        now, total = holding.contribution.now, holding.contribution.total
        self.events.write(
            "left",
            role=self.swarm.config.role,
            epoch=self.replica.epoch,
            root=holding.root_if_any(),
            samples=total.samples,
            epochs=total.epochs,
            seconds=total.seconds,
            samples_now=now.samples,
            epochs_now=now.epochs,
            loss=holding.loss,
        )

    def _keep_feedback(self) -> None:
        if not self.config.backup_every:
            return
        try:
            self.averager.save_feedback(self.folder.feedback)
        except OSError as error:
            self.events.write("backup_failed", epoch=self.replica.epoch, reason=str(error.strerror or error))

    def is_done(self) -> bool:
        """Whether the run has reached its end, or ours."""
        ends = [end for end in (self.settings.limits.max_epochs, self.config.max_epochs) if end]
        return bool(ends) and self.replica.epoch >= min(ends)

    # --- the second, third and fourth move ---

    def average(
        self, contribution: torch.Tensor | None, weight: float, *, attempts: int | None = None
    ) -> torch.Tensor | None:
        """Meet the others and return the average; None if the swarm went on without us.

        A trainer with nothing to bring tries once: if nobody takes it along it should rather go back to work. One whose
        work can also wait for the next round gives up after so many `attempts`.
        """
        root = self.holding.root()
        lost: frozenset[str] = frozenset()
        is_idle = contribution is None and self.swarm.config.role == "trainer"
        if contribution is not None:
            self.swarm.publish(phase="averaging")
        pause_s = MIN_RETRY_PAUSE_S
        deadline = time.monotonic() + self.settings.strategy.matchmaking_time_s
        while not self.stop.is_set():
            self.swarm.check_alive()
            if self.holding.standing() is not Standing.CURRENT or self.sits_out():
                return None
            if contribution is not None and self.is_alone():
                self.outcome = RoundOutcome(members={self.swarm.peer_id: weight})
                return contribution.clone()
            if not self.outlook.companions(self.replica.epoch, root):
                if is_idle or (attempts is not None and time.monotonic() > deadline):
                    return None
                self._tell_waiting("nobody is there to average with")
                self.stop.wait(NOBODY_PAUSE_S)
                continue
            request = self._request(root, contribution, weight, lost)
            self.outcome = outcome = self.averager.round(request, self.stop)
            if outcome.average is not None:
                self._is_waiting = False
                return outcome.average
            if self.stop.is_set():
                break
            lost |= outcome.lost.keys()
            self.events.write(
                "round_failed",
                epoch=self.replica.epoch,
                reason=outcome.failure,
                lost={self.swarm.name_of(peer_id): why for peer_id, why in outcome.lost.items()},
            )
            self.swarm.refresh()
            attempts = None if attempts is None else attempts - 1
            if is_idle or attempts == 0:
                return None
            if outcome.is_behind:
                self._wait_for_news()
            self.stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
        return None

    def sits_out(self) -> bool:
        """Whether the others keep us out. If so it waits a moment for the next epoch, which is ours to fetch."""
        if self.outlook.quarantine.sentence_of(self.swarm.peer_id) is None:
            return False
        if self.swarm.record.phase == "averaging":
            self.swarm.publish(phase="working", epoch_samples=0)
        deadline = time.monotonic() + SITTING_OUT_S
        while self.holding.standing() is Standing.CURRENT and time.monotonic() < deadline:
            if self.stop.wait(NEWS_PAUSE_S):
                break
        return True

    def _tell_waiting(self, reason: str) -> None:
        """Say once why nothing happens."""
        if not self._is_waiting:
            self._is_waiting = True
            self.events.write("waiting", epoch=self.replica.epoch, reason=reason)

    def update(self, average: torch.Tensor) -> None:
        """The same arithmetic on the same bytes, everywhere."""
        outcome = self.outcome or RoundOutcome()
        self.outlook.last_group = outcome.group - outcome.lost.keys()
        own = int(outcome.members.get(self.swarm.peer_id, 0))
        if not self.holding.update(average, own_samples=own, all_samples=int(outcome.weight)):
            self.averager.forget_feedback()  # what nobody applied should not come back later
        self.averager.give_back(average)
        self._tell_link()

    def _tell_link(self) -> None:
        """What our link carries, for those who look on; said anew only when it is something else."""
        link = self.averager.bandwidth
        told = {"upload": _roughly(link.upload), "download": _roughly(link.download)}
        if (self.swarm.record.upload, self.swarm.record.download) != (told["upload"], told["download"]):
            self.swarm.publish(**told)

    def verify(self) -> None:
        """Publish the root of what we now have, off this thread. Never waits: `standing` notices a mismatch later."""
        now = time.monotonic()
        seconds, self._epoch_started = now - self._epoch_started, now
        self.holding.freeze(self.outcome or RoundOutcome(), seconds)

    # --- what the others have ---

    def catch_up(self, reason: str) -> None:
        """Get the state of the history that wins, if it is not ours."""
        if self.holding.catch_up(reason):
            self.averager.settle_doubts()
            self._epoch_started = time.monotonic()

    def is_alone(self) -> bool:
        """No other trainer for a whole matchmaking window, and nobody else to average with now.

        A client-mode peer is never alone, it is cut off: nobody could ever join it, so what it did would be lost.
        """
        if not self.swarm.record.is_reachable:
            return False
        lonely_s = time.monotonic() - self.swarm.last_sign_of_trainers
        if lonely_s < self.settings.strategy.matchmaking_time_s:
            return False
        return not self.outlook.companions(self.replica.epoch, self.holding.root())

    def _request(
        self, root: str, contribution: torch.Tensor | None, weight: float, lost: frozenset[str]
    ) -> RoundRequest:
        epoch = self.replica.epoch
        return RoundRequest(
            epoch=epoch,
            parent_root=root,
            contribution=contribution,
            weight=weight,
            companions=lambda: self.outlook.companions(epoch, root),
            is_missing=self.swarm.is_missing,
            should_stop=lambda: self.stop.is_set() or self.holding.standing() is not Standing.CURRENT,
            is_patient=self.swarm.config.role == "aux",
            latecomers=lambda: self.outlook.latecomers(epoch, root),
            rank=self.outlook.rank,
            own_rank=self.outlook.own_rank(),
            lost=lost,
        )

    def _wait_for_news(self) -> None:
        """Somebody is ahead of us, but its record has not arrived yet."""
        deadline = time.monotonic() + self.settings.strategy.matchmaking_time_s
        while self.holding.standing() is Standing.CURRENT and time.monotonic() < deadline and not self.stop.is_set():
            time.sleep(NEWS_PAUSE_S)


def _roughly(rate: float) -> float:
    """With two digits: nobody wants to hear of every change."""
    return float(f"{min(rate, MAX_RATE):.2g}")
