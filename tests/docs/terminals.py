"""Typing the commands of a page, each in a terminal of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WAIT_S = 180.0  # for what usually takes seconds: the machine may be busy


class Terminals:
    """Runs the commands of a page, each in a process of its own, in one folder."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.home = folder, folder / "home"
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLLAB_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "COLUMNS": "120",
            **environment,
        }
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(self, command: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"terminal-{len(self._running)}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],  # exec: the process we know is the one that counts
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append((command, process, log))
        return process

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return next(log.read_text(errors="replace") for _, one, log in self._running if one is process)

    def finish(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until a command has ended well; returns what it printed."""
        self.wait_for(lambda: process.poll() is not None, "a command to end")
        assert process.returncode == 0, self.output(process)
        return self.output(process)

    def events(self) -> list[dict[str, Any]]:
        """Whole lines of every peer's event log."""
        texts = [path.read_text() for path in self.home.glob("*/*/events.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not happened():
            for command, process, log in self._running:
                assert process.poll() in (None, 0), f"{command}\n{log.read_text(errors='replace')}"
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.1)

    def close(self) -> list[str]:
        """End everything that was started, and what that started; returns what did not end when asked."""
        children = []
        for _, process, _ in self._running:
            if process.poll() is None:
                children += psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGINT)
        stubborn = []
        deadline = time.monotonic() + 15
        for command, process, _ in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stubborn.append(command)
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            stubborn.append(child.name())
            child.kill()
        return stubborn
