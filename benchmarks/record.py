"""What was measured, on disk after every repetition: a suite that is stopped goes on where it was."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

AND = " and "
PACKAGES = ("collab-train", "hivemind", "torch", "numpy")

Entry = dict[str, Any]


@dataclass(slots=True)
class Record:
    """The measurements of one suite with one set of versions, on one machine or where it does not matter on several."""

    path: Path
    machine: str
    versions: dict[str, str]
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, *, is_fresh: bool, has_times: bool = True) -> Record:
        """Take up earlier measurements, unless they are from other versions or another machine.

        Args:
            path: of the JSON.
            is_fresh: forget earlier ones.
            has_times: what was measured depends on the machine; otherwise one can go on where another was stopped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        record = cls(path, _machine(), {name: version(name) for name in PACKAGES})
        if path.exists() and not is_fresh:
            kept = json.loads(path.read_text())
            is_same = kept["machine"] == record.machine
            if kept["versions"] == record.versions and (is_same or not has_times):
                record.entries = kept["entries"]
                machines = {*kept["machine"].split(AND), record.machine}
                record.machine = AND.join(sorted(machines))
        return record

    def describe(self) -> str:
        return f"{self.machine}; " + ", ".join(f"{name} {number}" for name, number in self.versions.items())

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        content = {"machine": self.machine, "versions": self.versions, "entries": self.entries}
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(self.path)

    def entries_of(self, **key: Any) -> list[Entry]:
        """Everything measured with this arm, this size, this number of repetition."""
        return [entry for entry in self.entries if key.items() <= entry.items()]

    def seconds(self, arm: str, size: int) -> list[float]:
        return [entry["seconds"] for entry in self.entries_of(arm=arm, size=size) if "seconds" in entry]

    def has_given_up(self, arm: str, size: int) -> bool:
        return any("seconds" not in entry for entry in self.entries_of(arm=arm, size=size))


def _machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
