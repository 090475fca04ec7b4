"""Peers that need not load torch once more: each is forked from a process that has loaded it and did nothing else.

Starting Python and loading torch takes three seconds of a core, and a suite starts some two hundred peers. From there
on a peer of the nursery is as any other: a process and a session of its own, with its signals, files, sockets, daemon.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

LOADED = ["collab_aux", "collab_cli.app", "collab_core.library", "collab_core.session", "collab_trainer.gossip"]
"""Nothing that reads its settings from the environment when it is loaded, as the Hub's client does."""


def _open() -> Any:
    """The nursery of this process; it ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _be_a_peer(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    os.setsid()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # or it waits for us as we for it
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # a process of the nursery would make its children there too
    sys.argv = ["collab", *arguments]
    from collab_cli.app import main

    main()


class Forked:
    """A `collab` command in a process from the nursery; as much of `subprocess.Popen` as tests need."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process = _open().Process(target=_be_a_peer, args=(list(arguments), log, dict(environment)))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("collab", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
