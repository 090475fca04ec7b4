"""`collab dashboard`: one or more runs in a browser, without taking part."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from collab_cli import options
from collab_cli.failures import errors_in_words, show_error
from collab_cli.guest import visit
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal
from collab_core.errors import CollabError

if TYPE_CHECKING:
    from collab_core.run import Invite, RunFolder
    from collab_core.session import Session

LOOK_S = 2.0


def dashboard(
    runs: Annotated[list[str], typer.Argument(help="Invites of the runs to show.", metavar="INVITE…")],
    listen: Annotated[
        str,
        typer.Option(
            help="Where to serve the page; 0.0.0.0:8420 shows it to everyone.",
            metavar="HOST:PORT",
            rich_help_panel=options.NETWORK,
        ),
    ] = "127.0.0.1:8420",
    initial_peers: options.InitialPeers = None,
    verbose: options.Verbose = False,
) -> None:
    """Show runs in a browser, side by side. Joins them as a guest that nobody sees."""
    with errors_in_words(verbose=verbose), Stopping() as stopping, contextlib.ExitStack() as stack:
        console = Terminal()
        sources = [options.read_source(run) for run in runs]
        from collab_cli.watching import watch_as_guest
        from collab_dashboard import Dashboard, Place

        place = Place.parse(listen, "--listen")
        taken = stack.enter_context(place.bind("--listen"))
        with console.status("Asking the swarm…"):
            sessions = _visit_all(stack, sources, initial_peers)
        watches = [watch_as_guest(session) for session in sessions]
        with Dashboard(watches, taken, is_local=place.is_local) as served:
            names = ", ".join(session.manifest.settings.name for session in sessions)
            console.print(f"Showing [bold]{escape(names)}[/bold] at [bold cyan]{served.url}[/bold cyan]")
            console.print("Press Ctrl-C to end.\n", style="dim")
            stop = stopping.when_asked()
            while not stop.wait(LOOK_S):
                for session in sessions:
                    session.swarm.check_alive()


def _visit_all(
    stack: contextlib.ExitStack, sources: list[Invite | RunFolder], initial_peers: list[str] | None
) -> list[Session]:
    """As a guest of every run that can be reached; the others are named, unless there are no others."""
    sessions, failures = [], []
    for source in sources:
        try:
            sessions.append(stack.enter_context(visit(source, initial_peers)))
        except CollabError as error:
            failures.append(error)
    if not sessions:
        raise failures[0]
    for failure in failures:
        show_error(failure)
    return sessions
