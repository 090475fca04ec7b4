"""A gossip trainer's model on disk: backups that name the exchanges in them, and the archive it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import torch

from collab_core.archive import Archive, Prefer, Provenance
from collab_core.errors import ArchiveError, StateError
from collab_core.gossip.journal import ID_BYTES, MAX_REMEMBERED
from collab_core.session import Session
from collab_core.state.backup import Backup, read_backup, write_backup
from collab_core.state.layout import Layout
from collab_core.state.snapshot import Snapshot
from collab_core.state.tensors import raw

EXCHANGES = "gossip/exchanges"
PACKAGES = ("collab-train", "torch", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A model with all that belongs to it."""

    values: torch.Tensor
    """Flat, as the layout says; nobody changes it any more."""
    epoch: int
    """The round."""
    exchanges: Sequence[str]
    """IDs of the last exchanges that are in the model: in one file with it, so never more nor less than it holds."""
    samples: int
    loss: float | None = None

    @classmethod
    def of(cls, layout: Layout, backup: Backup) -> Kept:
        values = torch.empty(layout.num_values)
        for name, view in layout.views(values).items():
            view.copy_(backup.tensors[f"model/{name}"])
        return cls(
            values=values,
            epoch=int(backup.tensors["run/epoch"].item()),
            exchanges=[bytes(row).hex() for row in backup.tensors[EXCHANGES].tolist()],
            samples=backup.counters.get("samples", 0),
        )

    def tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        named = {f"model/{name}": view for name, view in layout.views(self.values).items()}
        ids = b"".join(bytes.fromhex(exchange) for exchange in self.exchanges[-MAX_REMEMBERED:])
        named[EXCHANGES] = torch.tensor(list(ids), dtype=torch.uint8).view(-1, ID_BYTES)
        named["run/epoch"] = torch.tensor(self.epoch, dtype=torch.int64)
        return named


class Keeping:
    """Writes off the training thread. A disk that is full or slow costs backups, never the run."""

    def __init__(self, session: Session, layout: Layout, files: Mapping[str, bytes]) -> None:
        """
        Args:
            session: whose model it is.
            layout: of the model.
            files: what belongs to the model beside its weights.
        """
        self._session, self._layout, self._files = session, layout, files
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collab-keep")
        self._next: Kept | None = None
        self._lock = threading.Lock()

    def restore(self) -> Kept | None:
        """What the last backup holds; None if there is none. One that is damaged is put aside."""
        path = self._session.folder.backup
        try:
            backup = read_backup(path, self._session.manifest.run_id)
            if backup is None:
                return None
            kept = Kept.of(self._layout, backup)
        except StateError as error:
            path.rename(path.with_suffix(".damaged"))
            self._session.events.write("backup_damaged", detail=error.message)
            return None
        self._session.events.write("restored", epoch=kept.epoch, root=backup.root)
        return kept

    def back_up(self, kept: Kept) -> None:
        """In the background. If the disk is slower than the run, only the newest one waits."""
        with self._lock:
            is_idle, self._next = self._next is None, kept
        if is_idle:
            self._background.submit(self._back_up)

    def archive(self, kept: Kept, within_s: float | None) -> None:
        """A version for `collab models`. One that is not written within its time is left where it is."""
        thread = threading.Thread(target=self._archive, args=(kept,), name="collab-archive", daemon=True)
        thread.start()
        thread.join(within_s)

    def close(self) -> None:
        """Wait for the backup that is under way."""
        self._background.shutdown(wait=True)

    def _back_up(self) -> None:
        with self._lock:
            kept, self._next = self._next, None
        assert kept is not None
        folder, run_id = self._session.folder, self._session.manifest.run_id
        try:
            snapshot = Snapshot(kept.epoch, kept.tensors(self._layout))
            write_backup(folder.backup, run_id, snapshot, {}, {"samples": kept.samples})
        except OSError as error:
            self._session.events.write("backup_failed", epoch=kept.epoch, reason=str(error.strerror or error))

    def _archive(self, kept: Kept) -> None:
        session = self._session
        prefer = Prefer(session.manifest.settings.checkpoints.prefer)
        provenance = Provenance(
            run_id=session.manifest.run_id,
            epoch=kept.epoch,
            contributors={session.swarm.name: kept.samples},
            samples=kept.samples,
            loss=kept.loss,
            packages={name: version(name) for name in PACKAGES},
        )
        try:
            archive = Archive(session.folder.archive, session.swarm.identity, prefer)
            tensors = {name: raw(tensor) for name, tensor in kept.tensors(self._layout).items()}
            archive.save(tensors, provenance, files=self._files, stored="model/")
            archive.close()
        except (ArchiveError, OSError) as error:
            reason = error.message if isinstance(error, ArchiveError) else str(error)
            session.events.write("archive_failed", epoch=kept.epoch, reason=reason)
