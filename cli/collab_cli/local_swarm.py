"""A swarm on this machine: one auxiliary and some trainers as real processes with real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collab_cli.stopping import PARENT_VARIABLE
from collab_core.errors import Code, RunError

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 9.5


@dataclass(slots=True)
class LocalPeer:
    """One child process and what it wrote."""

    role: str
    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    _read_bytes: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def read_events(self) -> list[dict[str, Any]]:
        """Events since the last look."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    def last(self, event: str) -> dict[str, Any] | None:
        return next((entry for entry in reversed(self.events) if entry["event"] == event), None)


class LocalSwarm:
    """Starts peers, watches over them, and ends every one of them."""

    def __init__(
        self,
        run: Path,
        folder: Path,
        *,
        data_dir: Path,
        num_trainers: int,
        epochs: int,
        verbose: bool,
        keeps_models: bool = False,
    ) -> None:
        """
        Args:
            run: folder of the run.
            folder: for the peers' state folders.
            data_dir: where the trainers' data is.
            num_trainers: besides one auxiliary.
            epochs: after which they leave.
            verbose: they say more.
            keeps_models: trainers keep a backup of what they had when they left; their models may differ.
        """
        self._data_dir = data_dir
        self._run, self._folder, self._num_trainers, self._epochs = run, folder, num_trainers, epochs
        self._invite_file = folder / "invite"
        self._verbose = verbose
        self._backup_every = epochs if keeps_models else 0
        self.peers: list[LocalPeer] = []
        num_threads = max(1, (os.cpu_count() or 1) // num_trainers)
        self._environment = {
            **os.environ,
            PARENT_VARIABLE: "1",
            "COLLAB_HOME": str(folder),  # a run of that name that is going on here is none of the demo's business
            "OMP_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "passive",  # threads that spin for work would take the other peers' cores
        }

    @property
    def trainers(self) -> list[LocalPeer]:
        return [peer for peer in self.peers if peer.role == "trainer"]

    @property
    def auxiliary(self) -> LocalPeer:
        return self.peers[0]

    def start(self) -> str:
        """Start everyone; returns the invite."""
        self._start("aux", "aux", str(self._run), "--invite-file", str(self._invite_file), "--backup-every-step", "1")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._invite_file.exists():
            self.check()
            if time.monotonic() > deadline:
                raise self._failure(self.auxiliary, "did not get ready in time")
            time.sleep(0.1)
        invite = self._invite_file.read_text().strip()
        for number in range(1, self._num_trainers + 1):
            options = ("--epochs", str(self._epochs), "--backup-every-step", str(self._backup_every))
            self._start(f"trainer-{number}", "train", invite, *options, "--data-dir", str(self._data_dir))
        return invite

    def _start(self, name: str, *command: str) -> None:
        folder = self._folder / name
        folder.mkdir()
        log = folder / "output.log"
        arguments = [*command, "--host-maddrs", LOOPBACK, "--state-dir", str(folder)]
        arguments += ["--verbose"] if self._verbose else []
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "collab_cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is ours to pass on, in the right order
            )
        self.peers.append(LocalPeer("aux" if command[0] == "aux" else "trainer", folder, process, log))

    def check(self) -> None:
        """Raise if a peer failed."""
        for peer in self.peers:
            if peer.process.poll() not in (None, 0):
                raise self._failure(peer, f"ended with exit code {peer.process.returncode}")

    def _failure(self, peer: LocalPeer, what: str) -> RunError:
        words = (line.strip("│╭╰─╮╯ ") for line in peer.log.read_text(errors="replace").splitlines())
        tail = [line for line in words if line][-12:]
        return RunError(
            Code.PEER_FAILED,
            f"The peer {peer.folder.name} {what}. Its last words:\n" + "\n".join(tail),
            fix="If it says what to do, do that; otherwise run again with --verbose.",
        )

    def watch(self) -> Iterator[list[dict[str, Any]]]:
        """New epochs, or rounds, of the trainers, until all of them are done."""
        while True:
            is_over = all(peer.process.poll() is not None for peer in self.trainers)
            self.check()
            news = [event for peer in self.trainers for event in peer.read_events()]
            yield [event for event in news if event["event"] in ("epoch", "round")]
            if is_over:
                return
            time.sleep(0.2)

    def stop(self) -> None:
        """End everyone: politely, then not."""
        for peer in reversed(self.peers):
            if peer.process.poll() is None:
                peer.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for peer in self.peers:
            try:
                peer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()
            peer.read_events()
