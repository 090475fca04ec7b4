"""`collab status`: who is in a run, how far it is."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.guest import visit
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    from collab_core.session import Session

WIDE = 90  # columns


def status(
    run: Annotated[str, typer.Argument(help="The run's invite, or its folder with --initial-peers.", metavar="INVITE")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    initial_peers: options.InitialPeers = None,
    verbose: options.Verbose = False,
) -> None:
    """Show who is in a run and how far it is. Joins for a moment, as a guest that nobody sees."""
    with errors_in_words(verbose=verbose), Stopping():
        source = options.read_source(run)
        err = Terminal(stderr=True)
        with err.status("Asking the swarm…"), visit(source, initial_peers) as session:
            report = observe(session)
        if as_json:
            print_json(report)
        else:
            console = Terminal()
            console.print(
                f"Run [bold]{escape(report['name'])}[/bold], {report['run_id'][:16]}, epoch {report['epoch']}"
            )
            if (newest := report["checkpoint"]) is not None:
                console.print(
                    f"Newest checkpoint: epoch {newest['epoch']}, {escape(newest['revision'])}", soft_wrap=True
                )
            console.print(peer_table(report["peers"], is_wide=console.width >= WIDE))
            for peer in report["peers"]:
                if (why := peer["quarantined"]) is not None:
                    words = f"{peer['name']} is kept out until epoch {why['until_epoch']}: {why['reason']}"
                    console.print(escape(words), soft_wrap=True)
            if not report["peers"]:
                console.print("Nobody is training right now. Join with: collab train INVITE")


def observe(session: Session) -> dict[str, Any]:
    """The run as everyone's records tell it."""
    from collab_core.overview import survey

    session.swarm.look_around(lambda: bool(session.swarm.peers()), threading.Event())
    seen = survey(session.swarm.peers(), session.manifest)
    return {
        "run_id": session.manifest.run_id,
        "name": session.manifest.settings.name,
        "epoch": seen.epoch,
        "model_root": seen.tip.root or None,
        "checkpoint": None if seen.checkpoint is None else seen.checkpoint.model_dump(),
        "peers": [
            {
                "peer_id": peer.peer_id,
                "name": peer.record.name,
                "role": peer.record.role,
                "mode": peer.record.mode,
                "version": peer.record.version,
                "phase": peer.record.phase,
                "epoch": peer.record.epoch,
                "samples": peer.record.samples,
                "contributed_epochs": peer.record.epochs,
                "contributed_seconds": peer.record.seconds,
                "epoch_samples": peer.record.epoch_samples,
                "samples_per_second": round(peer.record.samples_per_second, 2),
                "loss": peer.record.loss,
                "model_root": peer.record.root,
                "distance": None if peer.record.gossip is None else peer.record.gossip.distance,
                "last_seen": peer.record.time,
                "quarantined": None
                if (why := seen.kept_out.get(peer.peer_id)) is None
                else why.model_dump(exclude={"peer_id"}),
            }
            for peer in seen.peers
        ],
    }


def peer_table(peers: list[dict[str, Any]], *, is_wide: bool = False) -> Table:
    """Everyone in the run, for people; models that differ by design have a distance instead of a root."""
    is_gossip = any(peer["distance"] is not None for peer in peers)
    table = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    for heading, justify in (
        ("name", "left"),
        ("role", "left"),
        ("link", "left"),
        ("doing", "left"),
        ("epoch", "right"),
        ("samples", "right"),
        ("per s", "right"),
        ("loss", "right"),
        ("distance", "right") if is_gossip else ("root", "left"),
        ("seen", "right"),
    ):
        is_name = heading == "name"  # on a narrow terminal names are shortened, never numbers
        table.add_column(
            heading,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=not is_name,
            overflow="ellipsis",
            min_width=6 if is_name else None,
        )
    now = time.time()
    for peer in peers:
        loss = "" if peer["loss"] is None else f"{peer['loss']:.3f}"
        table.add_row(
            escape(peer["name"]),
            peer["role"],
            peer["mode"],
            peer["phase"] if peer["quarantined"] is None else "[red]quarantined[/red]",
            str(peer["epoch"]),
            str(peer["samples"]),
            f"{peer['samples_per_second']:.0f}" if peer["role"] == "trainer" else "",
            loss,
            _distance(peer["distance"]) if is_gossip else (peer["model_root"] or "")[:8],
            f"{max(0, now - peer['last_seen']):.0f} s",
        )
    return table


def _distance(distance: float | None) -> str:
    return "" if distance is None else f"{distance:.1e}"
