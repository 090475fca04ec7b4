"""Measures and keeps the versions of a run, off everybody's way."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import torch

from collab_aux.checkpointer import Checkpointer
from collab_core.archive import Archive, Keep, Prefer, Provenance
from collab_core.checkpoints.statement import Statement
from collab_core.errors import ArchiveError, CollabError
from collab_core.session import Session
from collab_core.state.snapshot import Snapshot
from collab_core.state.tensors import raw
from collab_core.swarm.record import MAX_COUNT

MAX_WAITING = 4  # states in memory that are not on disk yet
CLOSING_S = 1.5  # twice: a peer that is asked to leave does so within ten seconds, and a save may be cut anywhere
PACKAGES = ("collab-train", "torch", "numpy")

Facts = Mapping[str, object]
Evaluate = Callable[[Mapping[str, torch.Tensor]], float]


@dataclass(frozen=True, slots=True)
class Offer:
    """A state on its way to the disk."""

    snapshot: Snapshot
    provenance: Provenance
    statement: Statement | None
    """If it is to be uploaded too."""


class Archivist:
    """One thread that measures and saves what it is given. A disk that is full or slow costs versions, never the run.

    Args:
        session: whose run it is; the archive is in its state folder.
        loss: what the trainers say of the model now.
        files: what belongs to the model beside its weights.
        evaluate: the loss of a state on held-out data; None if that cannot be measured here.
        checkpointer: is given what is to be uploaded.
    """

    def __init__(
        self,
        session: Session,
        loss: Callable[[], float | None],
        files: Mapping[str, bytes],
        evaluate: Evaluate | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._session, self._loss, self._files = session, loss, files
        self._evaluate, self._checkpointer = evaluate, checkpointer
        self._settings = session.manifest.settings.checkpoints
        self._archive: Archive | None = None
        if self._settings.every:
            prefer = Prefer(self._settings.prefer)
            self._archive = Archive(session.folder.archive, session.swarm.identity, prefer)
        self._waiting: queue.Queue[Offer | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="collab-archive", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot, facts: Facts, history: Mapping[int, str], history_samples: int) -> None:
        """Keep a state, if its epoch is one to be kept."""
        is_uploaded = self._checkpointer is not None and self._checkpointer.is_due(snapshot.epoch)
        if not is_uploaded and not self._is_archived(snapshot.epoch):
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
        statement = None
        if is_uploaded:
            statement = Statement(
                run_id=self._session.manifest.run_id,
                epoch=snapshot.epoch,
                root=snapshot.root,
                history=sorted(history.items()),
                history_samples=min(history_samples, MAX_COUNT),
                loss=provenance.loss,
            )
        try:
            self._waiting.put_nowait(Offer(snapshot, provenance, statement))
        except queue.Full:
            self._tell_failure(snapshot.epoch, "the disk is slower than the run")

    def _is_archived(self, epoch: int) -> bool:
        return self._archive is not None and epoch % self._settings.every == 0

    def _run(self) -> None:
        if self._archive is not None:
            self._attempt(-1, self._archive.settle)
        while (offer := self._waiting.get()) is not None:
            held_out = self._measure(offer)
            if offer.statement is not None and self._checkpointer is not None:
                statement = offer.statement.model_copy(update={"held_out_loss": held_out})
                self._checkpointer.offer(offer.snapshot, statement)
            if self._is_archived(offer.snapshot.epoch):
                provenance = replace(offer.provenance, held_out_loss=held_out)
                self._attempt(offer.snapshot.epoch, partial(self._save, offer.snapshot, provenance))
        if self._archive is not None:
            self._archive.close()

    def _measure(self, offer: Offer) -> float | None:
        """The held-out loss, where it is due: now and then, and with everything that is uploaded."""
        epoch = offer.snapshot.epoch
        every = self._settings.evaluate
        if self._evaluate is None or every == 0 or (epoch % every and offer.statement is None):
            return None
        try:
            loss = self._evaluate(offer.snapshot.tensors)
        except Exception as error:  # noqa: BLE001 - a task's own code; mostly it needs data that is not here
            self._evaluate = None
            reason = error.message if isinstance(error, CollabError) else f"{type(error).__name__}: {error}"
            self._session.events.write("evaluation_failed", epoch=epoch, reason=reason)
            return None
        self._session.events.write("evaluated", epoch=epoch, held_out_loss=loss)
        return loss if math.isfinite(loss) else None

    def _attempt(self, epoch: int, work: Callable[[], None]) -> None:
        """Whatever the disk does, the next epoch is tried again."""
        try:
            work()
        except ArchiveError as error:
            self._tell_failure(epoch, error.message)
        except Exception as error:  # noqa: BLE001 - strangers' versions, the disk: whatever it is, this thread lives on
            self._tell_failure(epoch, f"{type(error).__name__}: {error}")

    def _save(self, snapshot: Snapshot, provenance: Provenance) -> None:
        assert self._archive is not None
        tensors = {name: raw(tensor) for name, tensor in snapshot.tensors.items()}
        parent = bytes(snapshot.tensors["run/parent_root"].tolist()).hex()
        self._archive.save(tensors, provenance, parent=parent, files=self._files, stored="model/")
        keep = Keep(last=self._settings.keep)
        if len(self._archive.droppable(keep)) >= keep.last:  # every time would be a lot of work for one version
            self._archive.collect_garbage(keep)

    def _tell_failure(self, epoch: int, reason: str) -> None:
        self._session.events.write("archive_failed", epoch=epoch, reason=reason)

    def close(self) -> None:
        """Save what waits, if that is quick."""
        try:
            self._waiting.put(None, timeout=CLOSING_S)
        except queue.Full:
            return
        self._thread.join(CLOSING_S)
        if self._checkpointer is not None:
            self._checkpointer.close()
