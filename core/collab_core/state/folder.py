"""A peer's folder on disk: identity, port, met peers, events, place in the data, backup. One living peer per folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

from collab_core.errors import Code, StateError
from collab_core.files import replace_file

MAX_REMEMBERED_PEERS = 32


class StateFolder:
    """Opens (and locks) a state folder.

    The lock is the kernel's: it vanishes with the process, also after kill -9, so a folder never stays locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a+b")  # noqa: SIM115 - held open for the life of the peer
        except OSError as error:
            raise StateError(
                Code.STATE_DIR_UNWRITABLE,
                f"The state folder {self.path} cannot be written: {error.strerror or error}.",
                fix="Give a folder you may write to: --state-dir SOME/FOLDER",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StateError(
                Code.STATE_DIR_IN_USE,
                f"Another peer on this machine is using the state folder {self.path}.",
                fix="Stop it first, or give this peer a folder of its own: --state-dir SOME/FOLDER",
            ) from error

    @classmethod
    def first_free(cls, parent: Path, role: str) -> StateFolder:
        """The first of `role`, `role-2`, `role-3`, … that no living peer holds: several peers can share a machine."""
        number = 1
        while True:
            try:
                return cls(parent / (role if number == 1 else f"{role}-{number}"))
            except StateError as error:
                if error.code is not Code.STATE_DIR_IN_USE:
                    raise
                number += 1

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def backup(self) -> Path:
        return self.path / "backup.collab"

    @property
    def feedback(self) -> Path:
        """What a lossy codec still owes the others."""
        return self.path / "feedback.collab"

    @property
    def download(self) -> Path:
        """Chunks of a state that is being fetched."""
        return self.path / "download.chunks"

    @property
    def archive(self) -> Path:
        """Every version of the model, at an auxiliary."""
        return self.path / "archive"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def exchanges(self) -> Path:
        """What became of the last meetings with others, in a gossip run."""
        return self.path / "exchanges.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def assets(self) -> Path:
        """The run's files: config and tokenizer of its model."""
        return self.path / "assets"

    @property
    def data_cache(self) -> Path:
        """What the task makes of its data, so that it is read faster the next time."""
        return self.path / "data-cache"

    @staticmethod
    def neighbours(parent: Path) -> list[str]:
        """Addresses of peers that keep, or kept, their folder beside ours."""
        addresses: list[str] = []
        for path in sorted(parent.glob("*/addresses.json")):
            addresses += _read_list(path)[:2]
        return addresses

    def write_addresses(self, addresses: list[str]) -> None:
        replace_file(self.path / "addresses.json", json.dumps(addresses).encode())

    def read_port(self) -> int | None:
        """The port of the last time, so that an invite stays true across restarts."""
        return self.port_in(self.path)

    @staticmethod
    def port_in(path: Path) -> int | None:
        """The same of any state folder, also of one that a living peer holds."""
        with contextlib.suppress(OSError, ValueError):
            port = int((path / "port").read_text())
            return port if 0 < port < 65536 else None
        return None

    def write_port(self, port: int) -> None:
        replace_file(self.path / "port", str(port).encode())

    def read_peers(self) -> list[str]:
        """Addresses of peers met before."""
        return _read_list(self.path / "peers.json")[:MAX_REMEMBERED_PEERS]

    def write_peers(self, addresses: list[str]) -> None:
        replace_file(self.path / "peers.json", json.dumps(addresses[:MAX_REMEMBERED_PEERS], indent=1).encode())

    def close(self) -> None:
        self._lock.close()


def _read_list(path: Path) -> list[str]:
    """A list of texts; a damaged file is worth as much as none."""
    with contextlib.suppress(OSError, ValueError):
        items = json.loads(path.read_text())
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return []
