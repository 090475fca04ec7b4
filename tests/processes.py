"""Real peers as real processes, for tests: start, wait for what they log, end them, see that nothing stays."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
BLIND_GUESS = math.log(256)
"""The loss of who knows nothing about the next byte. A peer's own first loss may be that of a trained model."""
GONE_WITHIN_S = 5.0
LOOK_EVERY_S = 1.0  # for the processes that a peer has started
LATE_VARIABLES = ("COLLAB_", "HF_")  # read by what a forked peer has yet to load, or when it is needed

Event = dict[str, Any]
Fork = Callable[[list[str], Path, dict[str, str]], Any]
"""Makes a process that runs a `collab` command, from one that has loaded everything: `nursery.Forked`."""


def collab(
    *arguments: str,
    timeout_s: float = 150,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a `collab` command to its end; with a prefix, on a host of the lab."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "collab_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**environment(), **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "COLLAB_EXIT_WITH_PARENT": "1"}


def write_run(folder: Path, *, name: str = "test-run", **changes: Any) -> Path:
    """A run folder with a small, quick model; `section__key=value` changes a setting."""
    made = collab("new", str(folder / name))
    assert made.returncode == 0, made.stderr
    path = folder / name / "run.toml"
    lines, section = [], ""
    wanted = {
        "task__options__width": 32,
        "task__options__layers": 1,
        "task__options__sequence_length": 64,
        "strategy__target_batch_size": 192,
        "strategy__matchmaking_time_s": 4.0,
        "strategy__averaging_timeout_s": 10.0,
        **changes,
    }
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].strip("[").replace(".", "__")
        key = line.partition("=")[0].strip()
        dotted = f"{section}__{key}" if section else key
        if dotted in wanted:
            line = f"{key} = {json.dumps(wanted.pop(dotted))}"
        lines.append(line)
    assert not wanted, f"no such settings: {wanted}"
    path.write_text("\n".join(lines) + "\n")
    return folder / name


class PeerProcess:
    """One `collab aux` or `collab train`, with its event log."""

    def __init__(
        self,
        state_dir: Path,
        *command: str,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        python: str = sys.executable,
        fork: Fork | None = None,
    ) -> None:
        self.state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self.log = state_dir / "output.log"
        self._output = open(self.log, "ab")  # noqa: SIM115 - the process writes to it as long as it lives
        arguments = [*command, "--state-dir", str(state_dir)]
        if not prefix and "--client-mode" not in command and "--host-maddrs" not in command:
            arguments += ["--host-maddrs", LOOPBACK]
        self.process: Any
        is_late = all(name.startswith(LATE_VARIABLES) for name in env or ())
        if fork is not None and is_late and not (prefix or program or python != sys.executable):
            self.process = fork(arguments, self.log, {**environment(), **(env or {})})
        else:
            self.process = subprocess.Popen(
                [*prefix, python, *(program or ("-m", "collab_cli")), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**environment(), **(env or {})},
                start_new_session=True,
            )
        self._descendants: set[psutil.Process] = set()

    def events(self, kind: str | None = None) -> list[Event]:
        path = self.state_dir / "events.jsonl"
        if not path.exists():
            return []
        data = path.read_bytes()
        entries = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return [entry for entry in entries if kind is None or entry["event"] == kind]

    def wait_for(
        self, kind: str, accept: Callable[[Event], bool] = lambda event: True, *, after: int = 0, timeout_s: float = 180
    ) -> Event:
        """The first event of a kind that is accepted, among those after the first `after` events of the log."""
        deadline = time.monotonic() + timeout_s
        num_bytes, look_at = 0, 0.0
        while True:
            ended = self.process.poll() is not None
            if (size := self._log_bytes()) != num_bytes:  # looking costs, and many wait at the same time
                num_bytes = size
                for event in self.events()[after:]:
                    if event["event"] == kind and accept(event):
                        return event
            if ended or time.monotonic() > deadline:
                what = f"ended with {self.process.returncode}" if ended else f"not within {timeout_s} s"
                raise AssertionError(f"{self.state_dir.name}: no {kind!r} event ({what})\n{self.tail()}")
            if time.monotonic() > look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                self.descendants()
            time.sleep(0.1)

    def _log_bytes(self) -> int:
        path = self.state_dir / "events.jsonl"
        return path.stat().st_size if path.exists() else 0

    def wait_for_last(self, kind: str) -> Event:
        """The last event of a kind in the log of a peer that has already ended."""
        return self.events(kind)[-1]

    def wait_for_epoch(self, epoch: int, timeout_s: float = 180) -> Event:
        return self.wait_for("epoch", lambda event: event["epoch"] >= epoch, timeout_s=timeout_s)

    def last_epoch(self) -> int:
        return max((event["epoch"] for event in self.events("epoch")), default=0)

    def roots(self) -> dict[int, str]:
        return {event["epoch"]: event["root"] for event in self.events("epoch")}

    def tail(self) -> str:
        output = self.log.read_text(errors="replace")[-3000:]
        return output + "\n" + "\n".join(json.dumps(event) for event in self.events()[-15:])

    def descendants(self) -> set[psutil.Process]:
        """Every process this peer ever started, as far as we saw."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._descendants |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._descendants

    def kill(self) -> None:
        """kill -9, which no peer can prepare for."""
        self.descendants()
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 15) -> int:
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return int(self.process.wait(timeout_s))

    def is_gone(self) -> bool:
        return not self.left_behind()

    def left_behind(self) -> list[str]:
        """Descendants that are still running."""
        alive = []
        for process in self._descendants:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.NoSuchProcess:
                continue
        return alive

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._output.close()


def without_colours(text: str) -> str:
    """What a terminal was told, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


class SwarmOfProcesses:
    """Peers of one run: an auxiliary that hands out the invite, trainers that use it."""

    def __init__(self, folder: Path, fork: Fork | None = None) -> None:
        self.folder, self._fork = folder, fork
        self.peers: list[PeerProcess] = []

    def start(self, name: str, *command: str, **options: Any) -> PeerProcess:
        peer = PeerProcess(self.folder / "peers" / name, *command, fork=self._fork, **options)
        self.peers.append(peer)
        return peer

    def aux(self, run: Path | str, name: str = "aux", *options: str, **more: Any) -> PeerProcess:
        invite_file = self.folder / "peers" / name / "invite"
        peer = self.start(name, "aux", str(run), "--invite-file", str(invite_file), *options, **more)
        wait_until(lambda: invite_file.exists() or peer.process.poll() is not None, "an invite", 120)
        assert peer.process.poll() is None, peer.tail()
        return peer

    def invite(self, name: str = "aux") -> str:
        return (self.folder / "peers" / name / "invite").read_text().strip()

    def trainer(self, name: str, *options: str, **more: Any) -> PeerProcess:
        batch = () if "--batch-size" in options else ("--batch-size", "8")
        return self.start(name, "train", self.invite(), *batch, *options, **more)

    def close(self) -> None:
        for peer in self.peers:
            peer.descendants()
            peer.close()
        for peer in self.peers:
            wait_until(peer.is_gone, f"{peer.left_behind()} to end", GONE_WITHIN_S)
