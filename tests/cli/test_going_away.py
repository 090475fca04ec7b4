"""Whoever reads our output, or the terminal itself, may go away: the peer goes on, or leaves as it should."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

from processes import environment, wait_until, write_run


def test_a_broken_pipe_ends_nobody() -> None:
    code = (
        "import threading; from collab_cli.terminal import Terminal; one = Terminal(); "
        "work = lambda: [one.print('x' * 1000) for _ in range(1000)]; "
        "thread = threading.Thread(target=work); thread.start(); thread.join(); work(); "
        "import sys; print('still here', file=sys.stderr)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "still here\n")


def test_a_peer_whose_terminal_is_closed_leaves_as_it_should(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    ours, theirs = pty.openpty()
    folder = tmp_path / "trainer"
    command = [sys.executable, "-m", "collab_cli", "train", str(run), "--batch-size", "8", "--state-dir", str(folder)]
    command += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment(), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    draining = threading.Thread(target=_drain, args=(ours,), daemon=True)
    draining.start()
    events = folder / "events.jsonl"
    wait_until(lambda: events.exists() and '"event": "epoch"' in events.read_text(), "an epoch", 90)
    os.kill(process.pid, signal.SIGHUP)
    os.close(ours)
    assert process.wait(15) == 0
    assert '"left"' in events.read_text()
    assert (folder / "backup.collab").exists()


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # it is closed
        return
