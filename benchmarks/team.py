"""Several processes that measure one thing together, and how they find and wait for each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAUSE_S = 0.002
POLL_S = 0.2
GONE_WITHIN_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class TeamFailed(Exception):
    """One of the processes did not get to its end."""


def run_team(
    module: str,
    arguments: list[str],
    num_processes: int,
    timeout_s: float,
    prefixes: Sequence[tuple[str, ...]] = (),
) -> list[dict[str, Any]]:
    """Run `python -m MODULE FOLDER RANK SIZE *arguments` once per rank; each prints one JSON document.

    Args:
        prefixes: what to put before each command: a host of the lab to run it on.

    Raises:
        TeamFailed: one failed, and the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="collab-bench-") as folder:
        command = [sys.executable, "-m", module, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        outputs = [Path(folder) / f"output-{rank}" for rank in range(num_processes)]
        workers: list[subprocess.Popen[bytes]] = []
        shared_before = set(SHARED_MEMORY.glob("torch_*"))
        try:
            for rank, path in enumerate(outputs):
                with path.open("wb") as output:
                    prefix = prefixes[rank] if prefixes else ()
                    arguments_of_rank = [*prefix, *command, str(rank), str(num_processes), *arguments]
                    workers.append(
                        subprocess.Popen(arguments_of_rank, stdout=output, env=environment, start_new_session=True)
                    )
            deadline = time.monotonic() + timeout_s
            while any(worker.poll() is None for worker in workers):
                if any(worker.returncode for worker in workers) or time.monotonic() > deadline:
                    raise TeamFailed(f"a process of {module} failed, or they took more than {timeout_s:.0f} s")
                time.sleep(POLL_S)
            if any(worker.returncode for worker in workers):
                raise TeamFailed(f"a process of {module} failed")
            return [json.loads(path.read_text()) for path in outputs]
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # also what it started and left
                worker.wait()
            _sweep(shared_before)


def _sweep(before: set[Path]) -> None:
    """Remove shared memory (`torch_<pid>_…`) whose process is gone; stock hivemind does not."""
    for path in set(SHARED_MEMORY.glob("torch_*")) - before:
        pid = path.name.split("_")[1]
        deadline = time.monotonic() + GONE_WITHIN_S
        while pid.isdigit() and (is_there := Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if pid.isdigit() and not is_there:
            path.unlink(missing_ok=True)


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
