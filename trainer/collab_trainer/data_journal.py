"""Where a peer stands in its data, on disk: the seed of its own stream, and the position to go on from."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collab_core.files import replace_file
from collab_core.telemetry import EventLog


class DataJournal:
    """One peer's place in one run's data.

    The seed is drawn at random when the journal is new: a peer that lost its folder must not begin the same stream.

    Args:
        path: of the file; made if there is none, or if it is damaged or of another run.
        run_id: the run the position is for.
        events: told if the disk takes no more; then training goes on, but a restart may repeat data.
    """

    def __init__(self, path: Path, run_id: str, events: EventLog) -> None:
        self._path, self._run_id, self._events = path, run_id, events
        self._has_failed = False
        self.seed, self.position = self._read() or (secrets.randbits(63), None)
        self.write(self.position)

    def write(self, position: Mapping[str, Any] | None) -> None:
        """Keep a position; once this returns, what lies before it will not be handed out again."""
        content = {"run_id": self._run_id, "seed": self.seed, "position": position}
        try:
            replace_file(self._path, json.dumps(content).encode())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._events.write("data_position_lost", reason=str(error.strerror or error))

    def tell_away(self, reason: str) -> None:
        """The data cannot be read now."""
        self._events.write("data_away", reason=reason)

    def _read(self) -> tuple[int, dict[str, Any] | None] | None:
        try:
            content = json.loads(self._path.read_bytes())
            seed, position = content["seed"], content["position"]
            is_ours = content["run_id"] == self._run_id
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or damaged
            return None
        is_sound = type(seed) is int and 0 <= seed < 2**63 and (position is None or isinstance(position, dict))
        return (seed, position) if is_ours and is_sound else None
