"""The copy of the run's state that a peer holds: its root, its backup, and how it is exchanged for a better one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from collab_core.averaging.round import RoundOutcome
from collab_core.checkpoints.content import Checkpoint, load_checkpoint
from collab_core.checkpoints.remotes import open_remote
from collab_core.checkpoints.statement import BadCheckpoint
from collab_core.errors import Code, CollabError, StateError
from collab_core.outlook import Outlook
from collab_core.run.manifest import Manifest
from collab_core.session import Session
from collab_core.state.backup import read_backup, salvage, write_backup
from collab_core.state.claims import is_trusted
from collab_core.state.download import Progress
from collab_core.state.exchange import Sources
from collab_core.state.history import Standing, Tip, goes_on_from, standing
from collab_core.state.replica import Replica
from collab_core.state.snapshot import Snapshot
from collab_core.swarm.record import MAX_COUNT, MAX_EPOCH

CATCH_UP_PAUSE_S = 0.3
PROGRESS_PERIOD_S = 1.0
REMOTE_PAUSE_S = 60.0  # between two looks at the checkpoints elsewhere


class Holding:
    """One replica, frozen and told to the others after every change.

    Args:
        backup_every: epochs between backups; 0 keeps none.
        on_change: called with every epoch we come to, before the others are told of it.
        on_backup: called when a backup was written, for what else should be kept with it; may raise OSError.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        outlook: Outlook,
        *,
        backup_every: int,
        on_change: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self.replica = replica
        self.contribution = session.contribution
        """What we gave to the run."""
        self.loss: float | None = None
        self.on_snapshot: Callable[[Snapshot, Mapping[str, object]], None] | None = None
        """Told of every state we come to, with what its epoch's event says; in whatever thread."""
        self.exists = False
        """False until we have a state of this run: what we built ourselves may differ from what the run pins."""
        self.history_samples = 0
        """Samples in all epochs that led to our state."""
        self._session, self._outlook, self._stop = session, outlook, stop
        self._swarm, self._events, self._manifest = session.swarm, session.events, session.manifest
        self._backup_every, self._on_change = backup_every, on_change
        self._backed_up = -1
        self._told_progress = 0.0
        self._next_remote = 0.0
        self._built: Snapshot | None = None
        self._salvaged: Snapshot | None = None
        """What is left of a backup that was damaged."""
        self._snapshot: Future[Snapshot] | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collab-verify")

    # --- from one epoch to the next ---

    def begin(self) -> None:
        """Take the backup up, if there is one, or what we built; tell of it if it is a state of this run."""
        self._restore()
        self._built = snapshot = self.replica.freeze()
        self.exists = self.replica.epoch > 0 or snapshot.root == self._manifest.initial_root
        if not self.exists:
            self._events.write("initial_state_differs", root=snapshot.root, pinned=self._manifest.initial_root)

    def announce(self) -> None:
        """Tell the others what we begin with."""
        if self.exists and self._built is not None:
            self._keep(self._built)

    def update(self, average: torch.Tensor, own_samples: int, all_samples: int) -> bool:
        """Apply an average that stands for so many samples. False: it was not finite, and nothing was changed."""
        stats = self.replica.update(average, self.root())
        self.contribution.add(own_samples)
        self.history_samples += all_samples
        if not stats.is_finite:
            self._events.write("gradient_not_finite", epoch=self.replica.epoch)
        return stats.is_finite

    def freeze(self, outcome: RoundOutcome, seconds: float) -> None:
        """Hash, publish and back up what came of a round, off this thread; `seconds` is what the epoch took."""
        name_of = self._swarm.name_of
        facts = {
            "samples": int(outcome.weight),
            "members": {name_of(peer_id): int(weight) for peer_id, weight in outcome.members.items()},
            "lost": {name_of(peer_id): why for peer_id, why in outcome.lost.items()},
            "seconds": round(seconds, 3),
            "matchmaking_s": round(outcome.matchmaking_s, 3),
            "reducing_s": round(outcome.reducing_s, 3),
            "share": round(outcome.share, 3),
            "bytes_sent": outcome.bytes_sent,
            "bytes_received": outcome.bytes_received,
            "loss": self.loss,
        }
        self._snapshot = self._background.submit(self._freeze, facts)

    def save(self) -> None:
        """Keep what we have, and end."""
        self.contribution.save()
        if self._snapshot is not None:
            snapshot = self._snapshot.result()
            if self._backup_every:
                self._background.submit(self._back_up, snapshot, dict(self.replica.history)).result()
        self._background.shutdown(wait=True)

    def root(self) -> str:
        """The root of our state; waits for the hashing if it is still under way."""
        assert self._snapshot is not None, "no state yet"
        return self._snapshot.result().root

    def root_if_any(self) -> str | None:
        return None if self._snapshot is None else self.root()

    def _freeze(self, facts: Mapping[str, object]) -> Snapshot:
        snapshot = self.replica.freeze()
        self._tell(snapshot)
        self._events.write(
            "epoch", epoch=snapshot.epoch, root=snapshot.root, parent_root=self.replica.parent_root, **facts
        )
        if self._backup_every and snapshot.epoch % self._backup_every == 0:
            self._background.submit(self._back_up, snapshot, dict(self.replica.history))
        if self.on_snapshot is not None:
            self.on_snapshot(snapshot, facts)
        return snapshot

    def _keep(self, snapshot: Snapshot) -> None:
        """A snapshot that is already made becomes ours."""
        self._snapshot = Future()
        self._snapshot.set_result(snapshot)
        self._tell(snapshot)
        if self.on_snapshot is not None:
            self.on_snapshot(snapshot, {})

    def _tell(self, snapshot: Snapshot) -> None:
        self._session.exchange.serve_state(snapshot, self.replica.history)
        self._on_change(snapshot.epoch)
        given = self.contribution.total
        self._swarm.publish(
            phase="serving" if self._swarm.config.role == "aux" else "working",
            epoch=snapshot.epoch,
            root=snapshot.root,
            parent_root=self.replica.parent_root,
            history_samples=min(self.history_samples, MAX_COUNT),
            epoch_samples=0,
            samples=given.samples,
            epochs=given.epochs,
            seconds=given.seconds,
            loss=self.loss,
        )

    # --- on disk ---

    def _restore(self) -> None:
        path = self._session.folder.backup
        try:
            backup = read_backup(path, self._manifest.run_id)
        except StateError as error:
            self._salvaged = salvage(path, self._manifest.run_id)
            path.rename(path.with_suffix(".damaged"))
            self._events.write("backup_damaged", detail=error.message)
            return
        if backup is not None:
            self.replica.load(backup.tensors, backup.history)
            self.contribution.remember(backup.counters.get("samples", 0))
            self.history_samples = backup.counters.get("history_samples", 0)
            self._events.write("restored", epoch=self.replica.epoch, root=backup.root)

    def _back_up(self, snapshot: Snapshot, history: Mapping[int, str]) -> None:
        if snapshot.epoch == self._backed_up:
            return
        counters = {"samples": self.contribution.total.samples, "history_samples": self.history_samples}
        try:
            write_backup(self._session.folder.backup, self._manifest.run_id, snapshot, history, counters)
            self._backed_up = snapshot.epoch
        except OSError as error:
            self._events.write("backup_failed", epoch=snapshot.epoch, reason=str(error.strerror or error))

    # --- beside the others ---

    def mine(self) -> Tip:
        """The end of our own history."""
        if not self.exists:
            return Tip.none(self._swarm.peer_id)
        return Tip(
            epoch=self.replica.epoch,
            root=self.root(),
            samples=self.history_samples,
            peer_id=self._swarm.peer_id,
            parent_root=self.replica.parent_root,
            is_trusted=is_trusted(self._swarm.peer_id, self._swarm.record, self._manifest),
        )

    def standing(self) -> Standing:
        """Whether we have what everyone should have."""
        if self._snapshot is None or not self._snapshot.done():
            return Standing.CURRENT
        mine = self.mine()
        return standing(mine, self.winning_tip(mine), self.replica.history)

    def winning_tip(self, mine: Tip) -> Tip:
        """The state everyone should have."""
        return self._outlook.winning_tip(mine, self.replica.history)

    def catch_up(self, reason: str) -> bool:
        """Get the state of the history that wins, if it is not ours. True if ours was replaced."""
        has_told = False
        while not self._stop.is_set():
            self._swarm.check_alive()
            if self._is_nobody_there() and self._from_remote():
                return True
            mine = self.mine()
            best = self.winning_tip(mine)
            if self.exists and standing(mine, best, self.replica.history) is Standing.CURRENT:
                return False
            if best is not mine:
                if self._adopt(best, reason):
                    return True
                self._outlook.put_aside(best)
            elif not has_told:
                has_told = True
                self._events.write("waiting", epoch=self.replica.epoch, reason="nobody here holds the run's state yet")
            self._stop.wait(CATCH_UP_PAUSE_S)
            self._swarm.refresh()
        return False

    def _is_nobody_there(self) -> bool:
        return not any(peer.record.root is not None for peer in self._outlook.others())

    def _from_remote(self) -> bool:
        """Nobody alive has a state. Go on from the newest checkpoint, if it is ahead of ours; true if we do.

        A download may take long and cannot be stopped, so it gets a thread that nobody waits for when we leave.
        """
        place = self._manifest.settings.checkpoints.remote
        start = time.monotonic()
        if not place or start < self._next_remote:
            return False
        self._next_remote = start + REMOTE_PAUSE_S
        found: Future[Checkpoint | None] = Future()
        threading.Thread(target=_search, args=(place, self._manifest, found), daemon=True).start()
        while not concurrent.futures.wait([found], timeout=CATCH_UP_PAUSE_S).done:
            if self._stop.is_set():
                return False
        try:
            checkpoint = found.result()
        except CollabError as error:
            if error.code is not Code.HUB_NOT_FOUND:  # there is none yet
                self._events.write("checkpoint_unreadable", place=place, reason=error.message)
            return False
        if checkpoint is None or (self.exists and checkpoint.statement.epoch <= self.replica.epoch):
            return False
        statement = checkpoint.statement
        self.replica.load(checkpoint.tensors, dict(statement.history))
        self.history_samples = statement.history_samples
        self.exists = True
        self._keep(self.replica.freeze())
        self._events.write(
            "from_checkpoint",
            epoch=statement.epoch,
            root=statement.root,
            place=place,
            seconds=round(time.monotonic() - start, 3),
        )
        return True

    def _adopt(self, best: Tip, reason: str) -> bool:
        self._swarm.publish(phase="joining")
        own = self._snapshot.result() if self._snapshot is not None else self._built
        assert own is not None, "begin() comes first"
        start = time.monotonic()
        sources = Sources(
            holders=lambda: self._outlook.donors(best),
            newcomers=self._outlook.newcomers,
            on_bad_donor=self._on_bad_donor,
            on_progress=self._tell_progress,
        )
        self._told_progress = start
        pool = self._session.folder.download
        spare = [self._salvaged] if self._salvaged is not None else []
        fetched = self._session.exchange.fetch_state(best.root, sources, own, pool, self._stop, spare)
        if fetched is None:
            return False
        if fault := self._fault(best, fetched.tensors, fetched.history):
            self._on_bad_donor(best.peer_id, fault)
            return False
        from_epoch = self.replica.epoch if self.exists else None
        self.replica.load(fetched.tensors, fetched.history)
        self.history_samples = min(best.samples, MAX_COUNT)
        self.exists = True
        self._salvaged = None
        self._outlook.last_group = frozenset()
        self._keep(self.replica.freeze())
        self._events.write(
            "resynced",
            reason=reason,
            from_epoch=from_epoch,
            epoch=self.replica.epoch,
            root=best.root,
            bytes=fetched.num_bytes,
            lost_bytes=sum(fetched.lost_bytes.values()),
            late_bytes=fetched.late_bytes,
            seconds=round(time.monotonic() - start, 3),
            donors=[self._swarm.name_of(donor) for donor in fetched.donors],
        )
        return True

    def _fault(self, best: Tip, tensors: Mapping[str, torch.Tensor], history: Mapping[int, str]) -> str:
        """Why a state that has the root it should have is still not taken; empty if it is fine."""
        floating = (tensor for tensor in tensors.values() if tensor.is_floating_point())
        if not all(bool(torch.isfinite(tensor).all()) for tensor in floating):
            return "offers a state that is not finite"
        if int(tensors["run/epoch"].item()) != best.epoch:
            return "claims another epoch than its state has"
        if best.epoch > MAX_EPOCH:
            return "claims an epoch that no run reaches"
        mine = self.mine()
        if mine.is_trusted and not best.is_trusted and not goes_on_from(mine, history):
            return "is ahead of the organiser's auxiliary on another history"
        return ""

    def _tell_progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._told_progress < PROGRESS_PERIOD_S:
            return
        self._told_progress = now
        self._events.write(
            "fetching",
            bytes=progress.num_bytes,
            total_bytes=progress.total_bytes,
            bytes_per_second=round(progress.bytes_per_second),
            donors=progress.num_donors,
        )

    def _on_bad_donor(self, peer_id: str, reason: str) -> None:
        self._events.write("donor_failed", peer_id=peer_id, name=self._swarm.name_of(peer_id), reason=reason)


def _search(place: str, manifest: Manifest, found: Future[Checkpoint | None]) -> None:
    """The newest checkpoint that is whole."""
    try:
        for folder in open_remote(place).newest(manifest):
            with contextlib.suppress(BadCheckpoint):  # then the one before it
                found.set_result(load_checkpoint(folder, manifest))
                return
        found.set_result(None)
    except CollabError as error:
        found.set_exception(error)
    except Exception as error:  # noqa: BLE001 - strangers' files and the network: whatever it is, we begin without it
        found.set_exception(StateError(Code.NO_STATE, f"{type(error).__name__}: {error}", fix="Look at the remote."))
