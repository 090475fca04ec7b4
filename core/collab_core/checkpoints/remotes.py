"""Where checkpoints go. A checkpoint is there whole or not at all, and the one before it stays until then."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from collab_core.archive.version import WEIGHTS
from collab_core.checkpoints.content import STATE, STATEMENT
from collab_core.checkpoints.statement import BadCheckpoint, Statement
from collab_core.errors import Code, CollabError, StateError
from collab_core.hub import download_folder, hub_in_words, is_hub_name
from collab_core.run.manifest import Manifest

NUM_KEPT = 3  # checkpoints in a folder; the Hub keeps all
ABANDONED_S = 86400.0  # nobody takes longer to copy one
MAX_LOOKED_AT = 20  # revisions of a repository, newest first


class Remote(Protocol):
    """A place for checkpoints."""

    def put(self, folder: Path, statement: Statement) -> str:
        """Keep the files of a folder as the newest checkpoint; where it is. Raises CollabError."""

    def newest(self, manifest: Manifest) -> Iterator[Path]:
        """Folders with checkpoints, newest first; those whose statement is sound. Raises CollabError."""


def open_remote(text: str) -> Remote:
    """`owner/name` is a repository on the Hub, anything else a folder."""
    return HubRemote(text) if is_hub_name(text) else FolderRemote(Path(text).expanduser())


class FolderRemote:
    """A folder, perhaps on a disk that several machines mount; in it one per run, and in that one per checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, folder: Path, statement: Statement) -> str:
        name = f"epoch-{statement.epoch:08}-{statement.root[:12]}"
        home = self._home(statement.run_id)
        beside = home / f".{name}.tmp"
        try:
            for left_behind in home.glob(".epoch-*.tmp"):  # by whoever was cut off
                if left_behind == beside or time.time() - left_behind.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left_behind, ignore_errors=True)
            home.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, beside)
            for path in beside.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            target = home / name
            if not target.exists():
                beside.rename(target)
            for old in _found(home)[NUM_KEPT:]:
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise StateError(
                Code.STATE_DIR_UNWRITABLE,
                f"The checkpoint cannot be written to {self._path}: {error.strerror or error}.",
                fix="Make room there, or change checkpoints.remote in run.toml.",
            ) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return str(target)

    def _home(self, run_id: str) -> Path:
        """A run file that was changed is another run; it may use the same place."""
        return self._path / run_id[:16]

    def newest(self, manifest: Manifest) -> Iterator[Path]:
        for folder in _found(self._home(manifest.run_id)):
            with contextlib.suppress(BadCheckpoint, OSError):
                Statement.from_bytes((folder / STATEMENT).read_bytes(), manifest)
                yield folder


def _found(home: Path) -> list[Path]:
    return sorted(home.glob("epoch-*"), reverse=True)


class HubRemote:
    """A repository on the Hub: one commit per checkpoint."""

    def __init__(self, repo: str) -> None:
        self._repo = repo

    def put(self, folder: Path, statement: Statement) -> str:
        from huggingface_hub import CommitOperationAdd, HfApi

        with hub_in_words(self._repo):
            api = HfApi()
            api.create_repo(self._repo, private=True, exist_ok=True)
            commit = api.create_commit(
                self._repo,
                [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())],
                commit_message=f"Epoch {statement.epoch}, root {statement.root[:12]}",
            )
        return str(commit.oid)

    def newest(self, manifest: Manifest) -> Iterator[Path]:
        from huggingface_hub import HfApi

        with hub_in_words(self._repo):
            commits = HfApi().list_repo_commits(self._repo)
        for commit in commits[:MAX_LOOKED_AT]:
            with contextlib.suppress(BadCheckpoint, OSError, CollabError):
                folder = download_folder(self._repo, commit.commit_id, [STATEMENT])
                Statement.from_bytes((folder / STATEMENT).read_bytes(), manifest)
                yield download_folder(self._repo, commit.commit_id, [STATEMENT, WEIGHTS, STATE])
