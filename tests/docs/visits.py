"""Peers that come and go: commands of `collab`, one after the other, each in a process of its own.

python visits.py COMMAND...      prints a JSON list: exit code and output of each

Loading torch and hivemind takes a peer seconds. Here they are loaded once, and every command runs in a fork of that.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from typing import IO, NoReturn

import hivemind
import torch

import collab_aux
import collab_core.session
import collab_trainer
from collab_cli.app import main

LOADED = (hivemind, torch, collab_aux, collab_core.session, collab_trainer)
WAIT_S = 120.0


def visit(command: str) -> tuple[int, str]:
    """Run a command until it has said that it is there, ask it to leave, and wait for its end."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if child == 0:
            run(command, log.fileno())
        deadline = time.monotonic() + WAIT_S
        status, is_asked = None, False
        while status is None:
            time.sleep(0.05)
            pid, found = os.waitpid(child, os.WNOHANG)
            status = found if pid else None
            if status is None and not is_asked and is_there(command, read(log)):
                os.kill(child, signal.SIGINT)
                is_asked = True
            if status is None and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(status), read(log)


def is_there(command: str, said: str) -> bool:
    if not command.startswith(("collab aux", "collab train", "collab dashboard")):
        return False  # ends by itself
    return ("Press Ctrl-C" if command.startswith(("collab aux", "collab dashboard")) else "Joined the run") in said


def read(log: IO[str]) -> str:
    return os.pread(log.fileno(), 1_000_000, 0).decode(errors="replace")


def run(command: str, output: int) -> NoReturn:
    """What the `collab` script does; never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = shlex.split(command)
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
    finally:  # `main` always exits; should it ever not, this is no second parent
        os._exit(1)


if __name__ == "__main__":
    assert threading.active_count() == 1, "a thread would be missing in the forks"
    torch.set_num_threads(1)
    print(json.dumps([visit(command) for command in sys.argv[1:]]))
