"""Exchanges that this peer decided on or asked for, on disk: after a restart it can tell which ones its model lost."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from collab_core.files import replace_file

MAX_ENTRIES = 256  # the file is written with every exchange
MAX_REMEMBERED = 4096  # in memory and in backups: whoever is in doubt asks for ten minutes, and must be told the truth
ID_BYTES = 16

_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")


def is_exchange_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Entry:
    """One exchange."""

    exchange: str
    partner: str
    """Peer ID."""


class Journal:
    """The last exchanges, replaced atomically with every entry.

    What it says is not what the model holds: a backup is older than the journal. A backup names the exchanges that are
    in it, so after a restart the two are compared, and the model is believed.

    Args:
        path: of the file; one that is damaged or of another run is worth as much as none.
        run_id: the run.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._entries = {entry.exchange: entry for entry in self._read()}

    def add(self, exchange: str, partner: str) -> None:
        """Note an exchange before anybody is told of it. Raises OSError if the disk takes no more."""
        self._entries[exchange] = Entry(exchange, partner)
        self._write()

    def remove(self, exchange: str) -> None:
        """It came to nothing."""
        if self._entries.pop(exchange, None) is not None:
            self._write()

    def reconcile(self, kept: Collection[str]) -> list[Entry]:
        """Forget and return the exchanges that a restored model, which holds those of `kept`, does not hold."""
        lost = [entry for entry in self._entries.values() if entry.exchange not in kept]
        for entry in lost:
            del self._entries[entry.exchange]
        if lost:
            self._write()
        return lost

    def _write(self) -> None:
        for exchange in list(self._entries)[:-MAX_ENTRIES]:
            del self._entries[exchange]
        content = {"run_id": self._run_id, "exchanges": [asdict(entry) for entry in self._entries.values()]}
        replace_file(self._path, json.dumps(content).encode())

    def _read(self) -> list[Entry]:
        try:
            content = json.loads(self._path.read_bytes())
            entries = [Entry(**entry) for entry in content["exchanges"][-MAX_ENTRIES:]]
            is_ours = content["run_id"] == self._run_id
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        is_sound = all(is_exchange_id(entry.exchange) and isinstance(entry.partner, str) for entry in entries)
        return entries if is_ours and is_sound else []
