"""What a peer's event log tells of the past."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_LOG_BYTES = 16 * 2**20


def read_log(path: Path, run_id: str) -> list[dict[str, Any]]:
    """The end of a peer's log, as far as it is of this run."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - MAX_LOG_BYTES)
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    except OSError:
        return []  # without a past, then
    found: list[dict[str, Any]] = []
    is_ours = True
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut off when the disk was full
        if not isinstance(event, dict) or not isinstance(event.get("time"), float | int):
            continue
        if event.get("event") == "joined":
            is_ours, was_ours = event.get("run_id") == run_id, is_ours
            if is_ours and not was_ours:
                found = []
        if is_ours:
            found.append(event)
    return found
