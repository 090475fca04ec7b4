"""What trainers and auxiliaries have in common: average, update, verify, and catching up with the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from collab_core.averaging import Bandwidth, ExactAverager, FailAt, RoundOutcome, RoundRequest
from collab_core.errors import StateError
from collab_core.outlook import Outlook
from collab_core.session import Session
from collab_core.state.backup import read_backup, write_backup
from collab_core.state.claims import is_trusted
from collab_core.state.history import Standing, Tip, standing
from collab_core.state.replica import Replica
from collab_core.state.snapshot import Snapshot
from collab_core.swarm.record import MAX_COUNT

logger = logging.getLogger(__name__)

CATCH_UP_PAUSE_S = 0.3
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.2, 2.0  # a failed round is tried again soon, then less and less so
NOBODY_PAUSE_S = 0.2
LEAVING_S = 3.0
FIRST_LOOK_S = 3.0  # how long a newcomer looks for others before it believes to be the first


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerConfig:
    """A peer's own choices, whatever its role."""

    backup_every: int = 10
    """Epochs between backups; 0 keeps none."""
    max_epochs: int = 0
    """Leave when the run has reached this epoch; 0 stays."""
    bandwidth: Bandwidth | None = None
    """What the link carries; None measures it."""
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
        self.swarm, self.exchange, self.manifest = session.swarm, session.exchange, session.manifest
        self.folder, self.events = session.folder, session.events
        self.replica, self.config, self.stop = replica, config, stop
        self.settings = self.manifest.settings
        self.samples = 0
        self.loss: float | None = None
        self.outcome: RoundOutcome | None = None
        self._history_samples = 0
        self._has_state = False
        self.outlook = Outlook(self.swarm, self.manifest)
        self._backed_up = -1
        self._is_waiting = False
        self._built: Snapshot | None = None
        self._epoch_started = time.monotonic()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collab-verify")
        self._snapshot: Future[Snapshot] | None = None
        self.averager = ExactAverager(
            self.swarm,
            self.settings,
            layout_hash=replica.layout.hash,
            num_values=replica.layout.num_values,
            bandwidth=config.bandwidth,
            fail_at=fail_at,
        )

    # --- coming and going ---

    def enter(self) -> None:
        """Take up where we left off, or where the others are."""
        if not self.config.is_active:
            self.swarm.publish(phase="serving")
            self._tell_joined(0, None)
            return
        self._restore()
        self._built = snapshot = self.replica.freeze()
        self._has_state = self.replica.epoch > 0 or snapshot.root == self.manifest.initial_root
        self._look_around()
        if self._has_state:
            self._keep(snapshot)
        else:
            self.events.write("initial_state_differs", root=snapshot.root, pinned=self.manifest.initial_root)
        self.catch_up("joining")
        if self._snapshot is not None:  # otherwise we were stopped before we had anything
            self._tell_joined(self.replica.epoch, self.root())

    def _tell_joined(self, epoch: int, root: str | None) -> None:
        swarm = self.swarm
        self.events.write(
            "joined",
            run_id=self.manifest.run_id,
            version=swarm.record.version,
            role=swarm.record.role,
            mode=swarm.record.mode,
            peer_id=swarm.peer_id,
            name=swarm.name,
            addresses=swarm.addresses,
            epoch=epoch,
            root=root,
        )

    def leave(self) -> None:
        """Keep what we have, and let others finish what they need from us."""
        self.averager.finish(LEAVING_S)
        if self._snapshot is not None:
            snapshot = self._snapshot.result()
            if self.config.backup_every:
                self._background.submit(self._back_up, snapshot, dict(self.replica.history)).result()
        root = self.root() if self._snapshot is not None else None
        role = self.swarm.config.role
        self.events.write("left", role=role, epoch=self.replica.epoch, root=root, samples=self.samples, loss=self.loss)
        self._background.shutdown(wait=True)

    def is_done(self) -> bool:
        """Whether the run has reached its end, or ours."""
        ends = [end for end in (self.settings.limits.max_epochs, self.config.max_epochs) if end]
        return bool(ends) and self.replica.epoch >= min(ends)

    def _restore(self) -> None:
        try:
            backup = read_backup(self.folder.backup, self.manifest.run_id)
        except StateError as error:
            self.folder.backup.rename(self.folder.backup.with_suffix(".damaged"))
            self.events.write("backup_damaged", detail=error.message)
            return
        if backup is not None:
            self.replica.load(backup.tensors, backup.history)
            self.samples = backup.counters.get("samples", 0)
            self._history_samples = backup.counters.get("history_samples", 0)
            self.events.write("restored", epoch=self.replica.epoch, root=backup.root)

    def _look_around(self) -> None:
        """Hear who is there before deciding that nobody is."""
        deadline = time.monotonic() + FIRST_LOOK_S
        while self.swarm.config.initial_peers and not self.outlook.others() and not self.stop.is_set():
            if time.monotonic() > deadline:
                break
            self.swarm.refresh()
            time.sleep(0.1)

    # --- the second, third and fourth move ---

    def average(self, contribution: torch.Tensor | None, weight: float) -> torch.Tensor | None:
        """Meet the others and return the average; None if the swarm went on without us.

        A trainer with nothing to bring tries once: if nobody takes it along it should rather go back to work.
        """
        root = self.root()
        lost: frozenset[str] = frozenset()
        is_idle = contribution is None and self.swarm.config.role == "trainer"
        if contribution is not None:
            self.swarm.publish(phase="averaging")
        pause_s = MIN_RETRY_PAUSE_S
        while not self.stop.is_set():
            self.swarm.check_alive()
            if self.standing() is not Standing.CURRENT:
                return None
            if contribution is not None and self.is_alone():
                self.outcome = RoundOutcome(members={self.swarm.peer_id: weight})
                return contribution.clone()
            if not self.outlook.companions(self.replica.epoch, root):
                if is_idle:
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
            if is_idle:
                return None
            if outcome.is_behind:
                self._wait_for_news()
            self.stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
        return None

    def _tell_waiting(self, reason: str) -> None:
        """Say once why nothing happens."""
        if not self._is_waiting:
            self._is_waiting = True
            self.events.write("waiting", epoch=self.replica.epoch, reason=reason)

    def update(self, average: torch.Tensor) -> None:
        """The same arithmetic on the same bytes, everywhere."""
        outcome = self.outcome or RoundOutcome()
        self.outlook.last_group = outcome.group - outcome.lost.keys()
        stats = self.replica.update(average, self.root())
        self.averager.give_back(average)
        self.samples += int(outcome.members.get(self.swarm.peer_id, 0))
        self._history_samples += int(outcome.weight)
        if not stats.is_finite:
            self.events.write("gradient_not_finite", epoch=self.replica.epoch)

    def verify(self) -> None:
        """Publish the root of what we now have, off this thread. Never waits: `standing` notices a mismatch later."""
        now = time.monotonic()
        seconds, self._epoch_started = now - self._epoch_started, now
        outcome = self.outcome or RoundOutcome()
        facts = {
            "samples": int(outcome.weight),
            "members": {self.swarm.name_of(peer_id): int(weight) for peer_id, weight in outcome.members.items()},
            "lost": {self.swarm.name_of(peer_id): why for peer_id, why in outcome.lost.items()},
            "seconds": round(seconds, 3),
            "matchmaking_s": round(outcome.matchmaking_s, 3),
            "reducing_s": round(outcome.reducing_s, 3),
            "share": round(outcome.share, 3),
            "bytes_sent": outcome.bytes_sent,
            "bytes_received": outcome.bytes_received,
            "loss": self.loss,
        }
        self._snapshot = self._background.submit(self._freeze, facts)

    def _freeze(self, facts: dict[str, object]) -> Snapshot:
        snapshot = self.replica.freeze()
        self._announce(snapshot)
        self.events.write(
            "epoch", epoch=snapshot.epoch, root=snapshot.root, parent_root=self.replica.parent_root, **facts
        )
        if self.config.backup_every and snapshot.epoch % self.config.backup_every == 0:
            self._background.submit(self._back_up, snapshot, dict(self.replica.history))
        return snapshot

    def _keep(self, snapshot: Snapshot) -> None:
        """A snapshot that is already made becomes ours."""
        self._snapshot = Future()
        self._snapshot.set_result(snapshot)
        self._announce(snapshot)

    def _announce(self, snapshot: Snapshot) -> None:
        self.exchange.serve_state(snapshot, self.replica.history)
        self.averager.set_epoch(snapshot.epoch)
        self.swarm.publish(
            phase="serving" if self.swarm.config.role == "aux" else "working",
            epoch=snapshot.epoch,
            root=snapshot.root,
            parent_root=self.replica.parent_root,
            history_samples=min(self._history_samples, MAX_COUNT),
            epoch_samples=0,
            samples=self.samples,
            loss=self.loss,
        )

    def _back_up(self, snapshot: Snapshot, history: Mapping[int, str]) -> None:
        if snapshot.epoch == self._backed_up:
            return
        counters = {"samples": self.samples, "history_samples": self._history_samples}
        try:
            write_backup(self.folder.backup, self.manifest.run_id, snapshot, history, counters)
            self._backed_up = snapshot.epoch
        except OSError as error:
            self.events.write("backup_failed", epoch=snapshot.epoch, reason=str(error.strerror or error))

    def root(self) -> str:
        """The root of our state; waits for the hashing if it is still under way."""
        assert self._snapshot is not None, "no state yet"
        return self._snapshot.result().root

    # --- what the others have ---

    def standing(self) -> Standing:
        """Whether we have what everyone should have."""
        if self._snapshot is None or not self._snapshot.done():
            return Standing.CURRENT
        mine = self.mine()
        return standing(mine, self.outlook.winning_tip(mine), self.replica.history)

    def is_alone(self) -> bool:
        """No other trainer for a whole matchmaking window, and nobody else to average with now.

        A client-mode peer is never alone, it is cut off: nobody could ever join it, so what it did would be lost.
        """
        if not self.swarm.record.is_reachable:
            return False
        lonely_s = time.monotonic() - self.swarm.last_sign_of_trainers
        if lonely_s < self.settings.strategy.matchmaking_time_s:
            return False
        return not self.outlook.companions(self.replica.epoch, self.root())

    def mine(self) -> Tip:
        """The end of our own history."""
        if not self._has_state:
            return Tip.none(self.swarm.peer_id)
        return Tip(
            epoch=self.replica.epoch,
            root=self.root(),
            samples=self._history_samples,
            peer_id=self.swarm.peer_id,
            is_trusted=is_trusted(self.swarm.peer_id, self.swarm.record, self.manifest),
        )

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
            should_stop=lambda: self.stop.is_set() or self.standing() is not Standing.CURRENT,
            is_patient=self.swarm.config.role == "aux",
            latecomers=lambda: self.outlook.latecomers(epoch, root),
            rank=self.outlook.rank,
            own_rank=self.outlook.own_rank(),
            lost=lost,
        )

    def _wait_for_news(self) -> None:
        """Somebody is ahead of us, but its record has not arrived yet."""
        deadline = time.monotonic() + self.settings.strategy.matchmaking_time_s
        while self.standing() is Standing.CURRENT and time.monotonic() < deadline and not self.stop.is_set():
            time.sleep(CATCH_UP_PAUSE_S)

    def catch_up(self, reason: str) -> None:
        """Get the state of the history that wins, if it is not ours."""
        while not self.stop.is_set():
            self.swarm.check_alive()
            mine = self.mine()
            best = self.outlook.winning_tip(mine)
            if self._has_state and standing(mine, best, self.replica.history) is Standing.CURRENT:
                return
            if best is mine:
                self._tell_waiting("nobody here holds the run's state yet")
            elif self._adopt(best, reason):
                return
            else:
                self.outlook.put_aside(best)
            self.stop.wait(CATCH_UP_PAUSE_S)
            self.swarm.refresh()

    def _adopt(self, best: Tip, reason: str) -> bool:
        self.swarm.publish(phase="joining")
        own = self._snapshot.result() if self._snapshot is not None else self._built
        assert own is not None
        start = time.monotonic()
        fetched = self.exchange.fetch_state(best.root, self.outlook.donors(best), own, self._on_bad_donor, self.stop)
        if fetched is None:
            return False
        floating = (tensor for tensor in fetched.tensors.values() if tensor.is_floating_point())
        if not all(bool(torch.isfinite(tensor).all()) for tensor in floating):
            self._on_bad_donor(best.peer_id, "offers a state that is not finite")
            return False
        if int(fetched.tensors["run/epoch"].item()) != best.epoch:
            self._on_bad_donor(best.peer_id, "claims another epoch than its state has")
            return False
        mine = self.mine()
        if mine.is_trusted and not best.is_trusted and fetched.history.get(mine.epoch) != mine.root:
            self._on_bad_donor(best.peer_id, "is ahead of the organiser's auxiliary on another history")
            return False
        from_epoch = self.replica.epoch if self._has_state else None
        self.replica.load(fetched.tensors, fetched.history)
        self._history_samples = min(best.samples, MAX_COUNT)
        self._has_state = True
        self.outlook.last_group = frozenset()
        self._keep(self.replica.freeze())
        self._epoch_started = time.monotonic()
        self.events.write(
            "resynced",
            reason=reason,
            from_epoch=from_epoch,
            epoch=self.replica.epoch,
            root=best.root,
            bytes=fetched.num_bytes,
            seconds=round(time.monotonic() - start, 3),
            donors=[self.swarm.name_of(donor) for donor in fetched.donors],
        )
        return True

    def _on_bad_donor(self, peer_id: str, reason: str) -> None:
        self.events.write("donor_failed", peer_id=peer_id, name=self.swarm.name_of(peer_id), reason=reason)
