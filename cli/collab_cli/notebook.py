"""A run from inside a notebook: `join` it, or `host` one; a picture that is drawn again and again, and words.

The peer is a process of its own, so that the notebook's Stop button asks it to leave instead of cutting it off, and a
kernel that is killed takes it along.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.markup import render

from collab_cli.lines import describe
from collab_cli.stopping import LEAVE_WITHIN_S, PARENT_VARIABLE
from collab_core.errors import ConfigError
from collab_core.run.invite import Invite

LOOK_S = 1.0
HOST_S = 120.0
MAX_LINES = 8
KILLED = """
The machine ended this peer, most likely because its memory was full. The others lost nothing but its last samples.

→ Restart the notebook's kernel, to free what else is in memory, and run this cell again; or let fewer samples go
  through the model at once: options = "--batch-size 4".
"""
COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS")
WIDTH, HEIGHT, MARGIN = 720, 240, 44
STYLE = "font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; margin: 0"


def join(invite: str, *, name: str = "", hours: float = 0, state_dir: str = "", options: str = "") -> None:
    """Train with the others until stopped, until the time is over, or until the run is.

    Args:
        invite: what the organiser gave you.
        name: what others see; empty: a friendly one.
        hours: be gone after so many; 0: as long as the notebook may run.
        state_dir: where this peer keeps its things; the same folder is the same peer. Empty: one for each run.
        options: more options of `collab train`, as on a command line.
    """
    if not invite.strip():
        _show(_words("Paste the invite that the organiser gave you into the form above, and run this cell again."))
        return
    more = _split(options)
    if more is None:
        return
    more += [*(["--name", name] if name else []), *(["--hours", str(hours)] if hours else [])]
    peer = Peer(Path(state_dir) if state_dir else _folder_for(invite), "train", invite, *more)
    draw = _show(_words("Starting…"))
    with peer.until_left():
        while peer.is_running():
            draw(peer.picture())
            time.sleep(LOOK_S)
    draw(peer.picture())


def host(run: str = "my-run", *, state_dir: str = "", options: str = "") -> str:
    """Write a run if there is none, and keep it going beside this notebook; returns its invite, or says why not."""
    more = _split(options)
    if more is None:
        return ""
    if not Path(run).exists():
        command = [sys.executable, "-m", "collab_cli", "new", run]
        made = subprocess.run(command, capture_output=True, text=True, check=False, env=_plain(os.environ))
        if made.returncode:
            _show(_words(made.stderr))
            return ""
    folder = Path(state_dir or f"collab-aux-{Path(run).name}").absolute()
    invite = folder / "invite"
    if folder in _hosted and _hosted[folder].is_running():  # the cell is run again
        return invite.read_text().strip()
    invite.unlink(missing_ok=True)
    peer = Peer(folder, "aux", run, "--invite-file", str(invite), *more)
    deadline = time.monotonic() + HOST_S
    try:
        while peer.is_running() and time.monotonic() < deadline:
            if invite.exists():
                _hosted[folder] = peer
                return invite.read_text().strip()
            time.sleep(0.2)
    except KeyboardInterrupt:
        peer.stop()
        raise
    peer.stop()
    _show(_words(peer.output()))
    return ""


def _split(options: str) -> list[str] | None:
    """As a shell does; None if they cannot be, which is said."""
    try:
        return shlex.split(options)
    except ValueError as error:
        _show(_words(f"The options cannot be read: {error}."))
        return None


def _folder_for(invite: str) -> Path:
    """One run, one key: who comes back is the same peer, and nobody can tell that it is in another run too."""
    try:
        return Path(f"collab-trainer-{Invite.decode(invite).run_hash.hex()[:8]}")
    except ConfigError:
        return Path("collab-trainer")  # the command will say what is wrong with the invite


_hosted: dict[Path, Peer] = {}
"""Auxiliaries that run beside this notebook, by their folders."""


class Peer:
    """One `collab train` or `collab aux`, and what it tells."""

    def __init__(self, folder: Path, command: str, source: str, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._events = folder / "output.log", folder / "events.jsonl"
        self._seen: list[dict[str, Any]] = []
        self._read_to = self._events.stat().st_size if self._events.exists() else 0
        arguments = [command, source, "--state-dir", str(folder), *options]
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "collab_cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_plain(os.environ), PARENT_VARIABLE: "1", "COLUMNS": "100"},
                start_new_session=True,  # the Stop button is for this notebook: it asks the peer to leave
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What happened since it was started; whole lines only."""
        if not self._events.exists():
            return self._seen
        with open(self._events, "rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._seen += [json.loads(line) for line in whole.splitlines()]
        return self._seen

    @contextlib.contextmanager
    def until_left(self) -> Iterator[None]:
        """However the block ends, the peer leaves; the Stop button ends it without a traceback."""
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            self.stop()

    def stop(self) -> None:
        if not self.is_running():
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(LEAVE_WITHIN_S + 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def picture(self) -> str:
        """Where the run is, the curve of the loss, and the last things that happened, as HTML."""
        events = self.events()
        done = [event for event in events if event["event"] in ("epoch", "round") and event["loss"] is not None]
        if not self.is_running() and self._process.returncode == -signal.SIGKILL:
            return _words(self.output() + KILLED)
        if not events or (not self.is_running() and self._process.returncode):
            return _words(self.output() or "Starting…")
        newest = itertools.islice(filter(None, map(describe, reversed(events))), MAX_LINES)
        told = _words("\n".join(str(render(line)) for line in reversed([*newest])))
        every = max(1, len(done) // WIDTH)  # a point for each pixel is enough
        points = [(event["epoch"], event["loss"]) for event in done[::-1][::every][::-1]]
        return told if len(points) < 2 else curve(points) + told


def _plain(environment: Mapping[str, str]) -> dict[str, str]:
    """Kernels tell programs to write in colours, as if a file were a terminal."""
    return {name: value for name, value in environment.items() if name not in COLOURS}


def curve(points: list[tuple[int, float]]) -> str:
    """The loss by epoch, as SVG."""
    epochs, losses = zip(*points, strict=True)
    low, high = min(losses), max(losses)
    across = (WIDTH - 2 * MARGIN) / max(epochs[-1] - epochs[0], 1)
    down = (HEIGHT - MARGIN) / max(high - low, 1e-9)
    path = " ".join(
        f"{MARGIN + (epoch - epochs[0]) * across:.1f},{MARGIN / 2 + (high - loss) * down:.1f}" for epoch, loss in points
    )
    label = 'font-family="ui-monospace, monospace" font-size="12" fill="currentColor"'
    right = f'x="{WIDTH - MARGIN}" text-anchor="end"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="loss {losses[-1]:.3f}">'
        f'<text x="0" y="{MARGIN / 2 + 4}" {label}>{high:.2f}</text>'
        f'<text x="0" y="{HEIGHT - MARGIN / 2}" {label}>{low:.2f}</text>'
        f'<text {right} y="{MARGIN / 2 + 4}" {label}>epoch {epochs[-1]}, loss {losses[-1]:.3f}</text>'
        f'<polyline points="{path}" fill="none" stroke="#0d9488" stroke-width="2"/></svg>'
    )


def _words(text: str) -> str:
    return f'<pre style="{STYLE}">{html.escape(text.strip())}</pre>'


def _show(picture: str) -> Callable[[str], None]:
    """Put something below the cell; returns how to put something else in its place."""
    from IPython.display import HTML, display

    handle = display(HTML(picture), display_id=True)
    return lambda other: handle.update(HTML(other))
