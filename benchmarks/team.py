"""Several processes that measure one thing together, and how they find and wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAUSE_S = 0.002
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def run_team(module: str, arguments: list[str], num_processes: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run `python -m MODULE FOLDER RANK SIZE *arguments` once per rank; each prints one JSON document."""
    with tempfile.TemporaryDirectory(prefix="collab-bench-") as folder:
        command = [sys.executable, "-m", module, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(num_processes), *arguments], stdout=subprocess.PIPE, env=environment
            )
            for rank in range(num_processes)
        ]
        try:
            outputs = [worker.communicate(timeout=timeout_s)[0] for worker in workers]
            if any(worker.returncode for worker in workers):
                raise SystemExit(f"A process of {module} failed; its own words are above.")
            return [json.loads(output) for output in outputs]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


@dataclass(frozen=True, slots=True)
class Team:
    """One process's view of the others."""

    folder: Path
    rank: int
    size: int

    @classmethod
    def from_argv(cls) -> tuple[Team, list[str]]:
        return cls(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.argv[4:]

    def tell(self, what: str, text: str = "") -> None:
        beside = self.folder / f".{what}-{self.rank}"
        beside.write_text(text)
        beside.rename(self.folder / f"{what}-{self.rank}")

    def hear(self, what: str, rank: int) -> str:
        path = self.folder / f"{what}-{rank}"
        while not path.exists():
            time.sleep(PAUSE_S)
        return path.read_text()

    def meet(self, what: str) -> None:
        """Go on together: waiting for each other is not part of any measurement."""
        self.tell(what)
        for rank in range(self.size):
            self.hear(what, rank)
