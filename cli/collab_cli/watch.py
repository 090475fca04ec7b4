"""`collab watch`: a run as it goes, without taking part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.guest import visit
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal
from collab_cli.view import RunView

LOOK_S = 0.5


def watch(
    run: Annotated[str, typer.Argument(help="The run's invite, or its folder with --initial-peers.", metavar="INVITE")],
    epochs: Annotated[int, typer.Option(min=0, help="Stop when the run has reached this epoch; 0 stays.")] = 0,
    initial_peers: options.InitialPeers = None,
    verbose: options.Verbose = False,
) -> None:
    """Watch a run as it goes: the loss, the epoch under way, and who does what. Nobody sees you."""
    with errors_in_words(verbose=verbose), Stopping() as stopping, contextlib.ExitStack() as stack:
        console = Terminal()
        source = options.read_source(run)
        with console.status("Asking the swarm…"):
            session = stack.enter_context(visit(source, initial_peers))
        view = RunView(session)
        stop = stopping.when_asked()
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=1 / LOOK_S, screen=True):
                _until_told(session.swarm.check_alive, view, stop, epochs)
            console.print(view)
        else:
            _until_told(session.swarm.check_alive, view, stop, epochs, console)


def _until_told(
    check: Callable[[], None], view: RunView, stop: threading.Event, epochs: int, console: Console | None = None
) -> None:
    """Look until asked to stop or the epoch is reached; with a console that is no terminal, a line for each epoch."""
    told = -1
    while not stop.wait(LOOK_S):
        check()
        seen = view.look()
        if console is not None and seen.peers and seen.epoch > told:
            told = seen.epoch
            loss = "" if seen.loss is None else f"  loss {seen.loss:.3f}"
            speed = f"{seen.samples_per_second:,.0f} samples/s"
            console.print(f"epoch {seen.epoch:>4}{loss}  {len(seen.trainers)} trainers  {speed}")
        if epochs and seen.epoch >= epochs:
            return
