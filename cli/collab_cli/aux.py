"""`collab aux`: reduce for others, hold and serve the state, hand out the invite."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.lines import EventLines
from collab_cli.stopping import Stopping


def aux(
    run: Annotated[str, typer.Argument(help="Folder of the run (made by `collab new`), or an invite.", metavar="RUN")],
    port: options.Port = None,
    host_maddrs: options.HostMaddrs = None,
    announce_maddrs: options.AnnounceMaddrs = None,
    bandwidth: options.Bandwidth = None,
    initial_peers: options.InitialPeers = None,
    identity_path: options.IdentityPath = None,
    invite_file: options.InviteFile = None,
    state_dir: options.StateDir = None,
    name: options.Name = None,
    as_active_peer: Annotated[
        bool,
        typer.Option(
            "--as-active-peer/--no-as-active-peer",
            help="Hold every epoch's state and serve it, or only reduce for others.",
        ),
    ] = True,
    backup_every: options.BackupEvery = 1,
    verbose: options.Verbose = False,
) -> None:
    """Help a run from a machine without a GPU: publish it, reduce, keep and serve its state."""
    with errors_in_words(verbose=verbose), Stopping() as stopping:
        console = Console(highlight=False)
        source = options.read_source(run)
        link = options.read_bandwidth(bandwidth)
        options.check_invite_file(invite_file)
        with console.status("Preparing the model and joining the run…"):
            import torch

            from collab_aux import Auxiliary
            from collab_core.averaging import FailAt
            from collab_core.files import replace_file
            from collab_core.peer import PeerConfig
            from collab_core.session import open_session
            from collab_core.swarm import SwarmConfig
            from collab_trainer import load_task, new_replica, prepare

            torch.set_num_threads(1)  # the update is elementwise and short; the cores belong to the network
            config = SwarmConfig(
                role="aux",
                initial_peers=tuple(initial_peers or ()),
                host_maddrs=tuple(host_maddrs or ()),
                announce_maddrs=tuple(announce_maddrs or ()),
                port=port,
                identity_path=identity_path,
                name=name or "",
            )
        with open_session(source, config, state_dir=state_dir, prepare=prepare) as session:
            session.events.listen(EventLines(console))
            settings = session.manifest.settings
            task = load_task(settings.task, options.task_context(source, session))
            peer = Auxiliary(
                session=session,
                replica=new_replica(settings, task.build_model()),
                config=PeerConfig(backup_every=backup_every, bandwidth=link, is_active=as_active_peer),
                stop=stopping.when_asked(),
                fail_at=FailAt.from_environment(),
            )
            peer.enter()
            invite = session.invite().encode()
            if invite_file is not None:
                replace_file(invite_file.absolute(), invite.encode() + b"\n")
            console.print(f"\nRun [bold]{settings.name}[/bold], {session.manifest.run_id[:16]}. Others join with:\n")
            console.print(f"collab train {invite}", style="bold cyan", soft_wrap=True)
            kept = "; the state is kept" if as_active_peer else ""
            console.print(f"\nPress Ctrl-C to leave{kept}.\n", style="dim")
            peer.run()
