"""Keeps the versions of a run, off everybody's way."""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version

from collab_core.archive import Archive, Keep, Provenance
from collab_core.errors import ArchiveError
from collab_core.session import Session
from collab_core.state.snapshot import Snapshot
from collab_core.state.tensors import raw

MAX_WAITING = 4  # states in memory that are not on disk yet
CLOSING_S = 1.5  # twice: a peer that is asked to leave does so within ten seconds, and a save may be cut anywhere
PACKAGES = ("collab-train", "torch", "numpy")

Facts = Mapping[str, object]


class Archivist:
    """One thread that saves what it is given. A disk that is full or slow costs versions, never the run.

    Args:
        session: whose run it is; the archive is in its state folder.
        loss: what the trainers say of the model now.
    """

    def __init__(self, session: Session, loss: Callable[[], float | None]) -> None:
        self._session, self._loss = session, loss
        self._settings = session.manifest.settings.checkpoints
        self._archive = Archive(session.folder.archive, session.swarm.identity)
        self._waiting: queue.Queue[tuple[Snapshot, Provenance] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="collab-archive", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot, facts: Facts) -> None:
        """Keep a state, if its epoch is one to be kept."""
        if snapshot.epoch % self._settings.every:
            return
        members = facts.get("members")
        samples = facts.get("samples")
        provenance = Provenance(
            run_id=self._session.manifest.run_id,
            epoch=snapshot.epoch,
            contributors=dict(members) if isinstance(members, Mapping) else {},
            samples=samples if isinstance(samples, int) else None,
            loss=self._loss(),
            packages={name: version(name) for name in PACKAGES},
        )
        try:
            self._waiting.put_nowait((snapshot, provenance))
        except queue.Full:
            self._tell_failure(snapshot.epoch, "the disk is slower than the run")

    def _run(self) -> None:
        self._attempt(-1, self._archive.settle)
        while (item := self._waiting.get()) is not None:
            snapshot, provenance = item
            self._attempt(snapshot.epoch, partial(self._save, snapshot, provenance))
        self._archive.close()

    def _attempt(self, epoch: int, work: Callable[[], None]) -> None:
        """Whatever the disk does, the next epoch is tried again."""
        try:
            work()
        except ArchiveError as error:
            self._tell_failure(epoch, error.message)
        except (OSError, sqlite3.Error) as error:
            self._tell_failure(epoch, f"{type(error).__name__}: {error}")

    def _save(self, snapshot: Snapshot, provenance: Provenance) -> None:
        tensors = {name: raw(tensor) for name, tensor in snapshot.tensors.items()}
        parent = bytes(snapshot.tensors["run/parent_root"].tolist()).hex()
        self._archive.save(tensors, provenance, parent=parent, files=self._session.assets, stored="model/")
        keep = self._settings.keep
        if len(self._archive.versions()) > 2 * keep:
            self._archive.collect_garbage(Keep(last=keep))

    def _tell_failure(self, epoch: int, reason: str) -> None:
        self._session.events.write("archive_failed", epoch=epoch, reason=reason)

    def close(self) -> None:
        """Save what waits, if that is quick."""
        try:
            self._waiting.put(None, timeout=CLOSING_S)
        except queue.Full:
            return
        self._thread.join(CLOSING_S)
