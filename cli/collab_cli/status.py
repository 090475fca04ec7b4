"""`collab status`: who is in a run, how far it is."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.stopping import Stopping

if TYPE_CHECKING:
    from collab_core.session import Session

LOOK_S = 4.0


def status(
    run: Annotated[str, typer.Argument(help="The run's invite, or its folder with --initial-peers.", metavar="INVITE")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    initial_peers: options.InitialPeers = None,
    verbose: options.Verbose = False,
) -> None:
    """Show who is in a run and how far it is. Joins for a moment, as a guest that nobody sees."""
    with errors_in_words(verbose=verbose), Stopping(), tempfile.TemporaryDirectory(prefix="collab-status-") as folder:
        source = options.read_source(run)
        err = Console(stderr=True)
        with err.status("Asking the swarm…"):
            from collab_core.session import open_session
            from collab_core.swarm import SwarmConfig
            from collab_trainer import prepare

            config = SwarmConfig(role="observer", client_mode=True, initial_peers=tuple(initial_peers or ()))
            with open_session(source, config, state_dir=Path(folder), prepare=prepare) as session:
                report = observe(session)
        if as_json:
            print(json.dumps(report, indent=2))
        else:
            console = Console(highlight=False)
            console.print(
                f"Run [bold]{escape(report['name'])}[/bold], {report['run_id'][:16]}, epoch {report['epoch']}"
            )
            console.print(peer_table(report["peers"]))
            if not report["peers"]:
                console.print("Nobody is training right now. Join with: collab train INVITE")


def observe(session: Session) -> dict[str, Any]:
    """The run as everyone's records tell it."""
    from collab_core.state.claims import common_tip

    deadline = time.monotonic() + LOOK_S
    while not session.swarm.peers() and time.monotonic() < deadline:
        session.swarm.refresh()
        time.sleep(0.2)
    peers = session.swarm.peers()
    tip = common_tip(peers, session.manifest)
    return {
        "run_id": session.manifest.run_id,
        "name": session.manifest.settings.name,
        "epoch": max(tip.epoch, 0),
        "model_root": tip.root or None,
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
                "epoch_samples": peer.record.epoch_samples,
                "samples_per_second": round(peer.record.samples_per_second, 2),
                "loss": peer.record.loss,
                "model_root": peer.record.root,
                "last_seen": peer.record.time,
            }
            for peer in peers
        ],
    }


def peer_table(peers: list[dict[str, Any]]) -> Table:
    """Everyone in the run, for people."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("name", "left"),
        ("role", "left"),
        ("link", "left"),
        ("doing", "left"),
        ("epoch", "right"),
        ("samples", "right"),
        ("per s", "right"),
        ("loss", "right"),
        ("root", "left"),
        ("seen", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    now = time.time()
    for peer in peers:
        loss = "" if peer["loss"] is None else f"{peer['loss']:.3f}"
        table.add_row(
            escape(peer["name"]),
            peer["role"],
            peer["mode"],
            peer["phase"],
            str(peer["epoch"]),
            str(peer["samples"]),
            f"{peer['samples_per_second']:.0f}" if peer["role"] == "trainer" else "",
            loss,
            (peer["model_root"] or "")[:8],
            f"{max(0, now - peer['last_seen']):.0f} s",
        )
    return table
