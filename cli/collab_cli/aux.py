"""`collab aux`: reduce for others, hold and serve the state, hand out the invite."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.lines import EventLines
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal

if TYPE_CHECKING:
    from collab_core.run import Invite, RunFolder


def aux(
    run: Annotated[str, typer.Argument(help="Folder of the run (made by `collab new`), or an invite.", metavar="RUN")],
    port: options.Port = None,
    host_maddrs: options.HostMaddrs = None,
    announce_maddrs: options.AnnounceMaddrs = None,
    bandwidth: options.Bandwidth = None,
    max_upload: options.MaxUpload = None,
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
    accept_models: options.AcceptModels = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            help="Serve a page that shows the run, e.g. 127.0.0.1:8420; 0.0.0.0:8420 shows it to everyone.",
            metavar="HOST:PORT",
            rich_help_panel=options.NETWORK,
        ),
    ] = None,
    dashboard_url: Annotated[
        str | None,
        typer.Option(
            help='Where people open that page, for the run\'s join.md; "" if they cannot. '
            "Default: this machine's address, if the page is shown to everyone.",
            metavar="URL",
            rich_help_panel=options.NETWORK,
        ),
    ] = None,
    wandb_project: Annotated[
        str | None,
        typer.Option(help="Send the run's curves to this project of Weights & Biases (needs `pip install wandb`)."),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Help a run from a machine without a GPU: publish it, reduce, keep and serve its state."""
    with errors_in_words(verbose=verbose), Stopping() as stopping, contextlib.ExitStack() as stack:
        console = Terminal()
        source = options.read_source(run)
        options.check_machine("aux", state_dir)
        link = options.read_bandwidth(bandwidth)
        options.check_invite_file(invite_file)
        if dashboard is not None:  # a port that is taken is said before joining, not after
            from collab_dashboard import Place

            options.check_url(dashboard_url, "--dashboard-url")
            place = Place.parse(dashboard, "--dashboard")
            taken = stack.enter_context(place.bind("--dashboard"))
        from collab_core.swarm import SwarmConfig

        config = SwarmConfig(
            role="aux",
            initial_peers=tuple(initial_peers or ()),
            host_maddrs=tuple(host_maddrs or ()),
            announce_maddrs=tuple(announce_maddrs or ()),
            port=port,
            identity_path=identity_path,
            name=name or "",
        )
        with console.status("Preparing the model and joining the run…"):
            import torch

            from collab_aux import Auxiliary, GossipAuxiliary
            from collab_core.archive import Prefer
            from collab_core.averaging.faults import FailAt
            from collab_core.files import replace_file
            from collab_core.library import Library
            from collab_core.peer import PeerConfig
            from collab_core.session import open_session
            from collab_core.swarm.addresses import host_and_port
            from collab_trainer import evaluator, load_task, model_files, new_replica, prepare, writer

            torch.set_num_threads(1)  # the update is elementwise and short; the cores belong to the network
            session = stack.enter_context(open_session(source, config, state_dir=state_dir, prepare=prepare))
        session.events.listen(EventLines(console))
        session.exchange.throttle.bytes_per_second = options.bytes_per_second(max_upload)
        settings = session.manifest.settings
        is_gossip = settings.strategy.name == "gossip"
        peer: Auxiliary | GossipAuxiliary
        task = None
        is_watched = dashboard is not None or wandb_project is not None
        if is_gossip:
            peer = GossipAuxiliary(session=session, stop=stopping.when_asked())
        else:
            task = load_task(settings.task, options.task_context(source, session))
            model = task.build_model()
            peer = Auxiliary(
                files=model_files(model, session.assets),
                evaluate=evaluator(task, model),
                write=writer(task, task.build_model()) if is_watched and as_active_peer else None,
                session=session,
                replica=new_replica(settings, model),
                config=PeerConfig(
                    backup_every=backup_every,
                    bandwidth=link,
                    max_upload=options.bytes_per_second(max_upload),
                    is_active=as_active_peer,
                ),
                stop=stopping.when_asked(),
                fail_at=FailAt.from_environment(),
            )
        trusted = set(accept_models or ())
        kept = session.folder.archive if as_active_peer and settings.checkpoints.every and not is_gossip else None
        Library(
            session.swarm,
            kept,
            may_push=lambda peer_id: bool(trusted & {peer_id, "anyone"}),
            prefer=Prefer(settings.checkpoints.prefer),
        )
        if wandb_project is not None:
            from collab_core.telemetry.wandb_sink import WandbSink

            stack.enter_context(WandbSink(wandb_project, session.manifest, session.folder.path, session.events))
        if dashboard is not None:
            from collab_cli.watching import watch_as_auxiliary
            from collab_dashboard import Dashboard

            watch = watch_as_auxiliary(session, task, kept)
            served = stack.enter_context(Dashboard([watch], taken, is_local=place.is_local))
            console.print(f"Dashboard: [bold cyan]{served.url}[/bold cyan]")
        peer.enter()
        invite = session.invite().encode()
        if invite_file is not None:
            replace_file(invite_file.absolute(), invite.encode() + b"\n")
        live = dashboard_url or None
        if dashboard is not None and not place.is_local and dashboard_url is None:
            host = next(filter(None, map(host_and_port, session.invite().initial_peers)), (place.host, 0))[0]
            live = f"http://{Place(host, taken.getsockname()[1])}/"
        put_into_page(source, invite, live, console)
        console.print(f"\nRun [bold]{settings.name}[/bold], {session.manifest.run_id[:16]}. Others join with:\n")
        console.print(f"collab train {invite}", style="bold cyan", soft_wrap=True)
        what = "; the state is kept" if as_active_peer and not is_gossip else ""
        console.print(f"\nPress Ctrl-C to leave{what}.\n", style="dim")
        peer.run()


def put_into_page(source: Invite | RunFolder, invite: str, live: str | None, console: Console) -> None:
    """The organiser's page to join by gets the invite, and the address of a dashboard that everyone may see.

    If that fails, the run goes on without it.
    """
    from collab_core.errors import StateError
    from collab_core.run import Invite

    if isinstance(source, Invite):
        return
    try:
        if source.tell_invite(invite, live):
            console.print(f"\nThe invite is in [bold]{source.join_file}[/bold], a page for people to join by.")
    except StateError as error:
        console.print(f"{source.join_file} does not have the invite: {error}", style="yellow")
