"""Puts whole states where they outlive every peer: on the Hub, or in a folder."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from collab_core.checkpoints.card import checkpoint_card
from collab_core.checkpoints.content import write_checkpoint
from collab_core.checkpoints.remotes import open_remote
from collab_core.checkpoints.statement import Statement
from collab_core.errors import Code, CollabError
from collab_core.session import Session
from collab_core.state.snapshot import Snapshot
from collab_core.swarm.record import CheckpointNote

PAUSES_S = (5.0, 30.0)  # between attempts; then the next due epoch is the next attempt
CLOSING_S = 2.0
HOPELESS = (Code.HUB_DENIED, Code.HUB_NOT_FOUND)  # nobody needs to be asked twice for what they will not give


class Checkpointer:
    """One thread that uploads the newest state it was given. Whatever happens there, the run goes on.

    Args:
        session: whose run it is.
        files: what belongs to the model beside its weights.
        is_turn: whether we are the one who uploads now; several could.
    """

    def __init__(self, session: Session, files: Mapping[str, bytes], is_turn: Callable[[], bool]) -> None:
        self._session, self._files, self._is_turn = session, files, is_turn
        self._settings = session.manifest.settings.checkpoints
        self._remote = open_remote(self._settings.remote)
        self._next: tuple[Snapshot, Statement] | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collab-checkpoint", daemon=True)
        self._thread.start()

    def is_due(self, epoch: int) -> bool:
        return epoch > 0 and epoch % self._settings.upload_every == 0 and self._is_turn()

    def offer(self, snapshot: Snapshot, statement: Statement) -> None:
        """Upload this state next; one that still waits is not needed any more."""
        swarm = self._session.swarm
        with self._changed:
            self._next = snapshot, statement.signed(swarm.identity, swarm.grant)
            self._changed.notify()

    def _run(self) -> None:
        for left_behind in self._session.folder.path.glob("checkpoint-*"):  # by a peer that was killed
            shutil.rmtree(left_behind, ignore_errors=True)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing.is_set())
                if self._next is None:
                    return
                snapshot, statement = self._next
                self._next = None
            self._upload(snapshot, statement)

    def _upload(self, snapshot: Snapshot, statement: Statement) -> None:
        start = time.monotonic()
        for pause_s in (*PAUSES_S, None):
            try:
                revision = self._put(snapshot, statement)
            except (CollabError, OSError) as error:
                reason = error.message if isinstance(error, CollabError) else str(error.strerror or error)
                self._session.events.write("checkpoint_failed", epoch=statement.epoch, reason=reason)
                is_hopeless = isinstance(error, CollabError) and error.code in HOPELESS
                if pause_s is None or is_hopeless or self._closing.wait(pause_s):
                    return
                continue
            note = CheckpointNote(epoch=statement.epoch, root=statement.root, revision=revision)
            self._session.swarm.publish(checkpoint=note)
            self._session.events.write(
                "checkpoint",
                epoch=statement.epoch,
                root=statement.root,
                place=self._settings.remote,
                revision=revision,
                seconds=round(time.monotonic() - start, 3),
            )
            return

    def _put(self, snapshot: Snapshot, statement: Statement) -> str:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=self._session.folder.path) as name:
            card = checkpoint_card(self._session.manifest, statement)
            write_checkpoint(Path(name), snapshot.tensors, statement, self._files, card)
            return self._remote.put(Path(name), statement)

    def close(self) -> None:
        """Finish what is under way, if that is quick; a cut-off upload leaves the checkpoint before it."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(CLOSING_S)
