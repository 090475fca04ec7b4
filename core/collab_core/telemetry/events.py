"""The event log: one JSON line per thing that happened to this peer, for people and scripts to read afterwards."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_UNHEARD = 100
MAX_PAST_BYTES = 16 * 2**20

Listener = Callable[[dict[str, Any]], None]


class EventLog:
    """Appends events to `events.jsonl` and tells listeners (the terminal) about them. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the life of the peer
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._unheard: list[dict[str, Any]] = []
        """What happened before anybody listened, for the first one who does."""
        self._can_write = True

    def listen(self, listener: Listener) -> None:
        with self._lock:
            unheard, self._unheard = self._unheard, []
            self._listeners.append(listener)
        for entry in unheard:
            listener(entry)

    def write(self, event: str, **fields: Any) -> None:
        """Record an event: joined, epoch, resynced, refused, left, …, with what one needs to understand it."""
        entry = {"time": round(time.time(), 3), "event": event, **fields}
        with self._lock:
            if not self._file.closed:
                try:
                    self._file.write(json.dumps(entry) + "\n")
                    self._file.flush()
                    self._can_write = True
                except OSError as error:  # a full disk must not stop training
                    if self._can_write:
                        logger.warning("The event log cannot be written: %s", error)
                    self._can_write = False
            if not self._listeners and len(self._unheard) < MAX_UNHEARD:
                self._unheard.append(entry)
        for listener in self._listeners:
            listener(entry)

    def past(self, run_id: str) -> list[dict[str, Any]]:
        """What happened so far in this run, in earlier visits too; of a long log only the end."""
        try:
            with open(self._path, "rb") as file:
                start = max(file.seek(0, os.SEEK_END) - MAX_PAST_BYTES, 0)
                file.seek(start)
                lines = file.read().splitlines()[1 if start else 0 :]
        except OSError:
            return []  # without a past, then
        found: list[dict[str, Any]] = []
        is_ours = True
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut off when the peer was killed, or the disk full
            if not isinstance(entry, dict) or not isinstance(entry.get("time"), float | int) or "event" not in entry:
                continue
            if entry["event"] == "joined":
                is_ours, was_ours = entry.get("run_id") == run_id, is_ours
                if is_ours and not was_ours:
                    found = []
            if is_ours:
                found.append(entry)
        return found

    def close(self) -> None:
        with self._lock:
            self._file.close()
