"""`collab train`: join a run and compute gradients for it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.lines import EventLines
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal
from collab_cli.time_limit import time_limit
from collab_cli.view import showing

YOURS = "Your machine"


def train(
    run: Annotated[
        str, typer.Argument(help="The invite you were given, or the folder of a run.", metavar="INVITE|RUN")
    ],
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples per forward and backward pass; fewer at once if memory runs out. Default: tuned.",
            rich_help_panel=YOURS,
        ),
    ] = None,
    accumulate_batches: Annotated[
        int, typer.Option(min=1, help="Batches to add up before looking at what the swarm does.", rich_help_panel=YOURS)
    ] = 1,
    n_workers: Annotated[int, typer.Option(min=0, help="Threads that prepare data.", rich_help_panel=YOURS)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.", rich_help_panel=YOURS)] = "auto",
    epochs: Annotated[
        int, typer.Option(min=0, help="Leave when the run has reached this epoch; 0 stays.", rich_help_panel=YOURS)
    ] = 0,
    hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Be gone after this many hours. Limits of Kaggle and Colab are noticed without it.",
            rich_help_panel=YOURS,
        ),
    ] = None,
    nice: Annotated[
        int,
        typer.Option(
            min=0,
            max=19,
            help="Let this machine's other programs go first: 10 or more, up to 19.",
            rich_help_panel=YOURS,
        ),
    ] = 0,
    data_dir: options.DataDir = None,
    name: options.Name = None,
    client_mode: Annotated[
        bool,
        typer.Option(
            "--client-mode",
            help="Only dial out; others reduce for you. Found out by itself where nobody can connect (NAT, notebooks).",
            rich_help_panel=options.NETWORK,
        ),
    ] = False,
    use_relay: Annotated[
        bool,
        typer.Option(
            "--use-relay",
            help="If nobody can connect to this machine, be reached through an auxiliary, and reduce for others.",
            rich_help_panel=options.NETWORK,
        ),
    ] = False,
    port: options.Port = None,
    host_maddrs: options.HostMaddrs = None,
    announce_maddrs: options.AnnounceMaddrs = None,
    bandwidth: options.Bandwidth = None,
    max_upload: options.MaxUpload = None,
    initial_peers: options.InitialPeers = None,
    identity_path: options.IdentityPath = None,
    invite_file: options.InviteFile = None,
    state_dir: options.StateDir = None,
    backup_every: options.BackupEvery = 10,
    sync_args: Annotated[
        bool,
        typer.Option(
            "--sync-args/--no-sync-args",
            help="With a run folder: take shared settings from the running run, or insist on the file's.",
        ),
    ] = True,
    verbose: options.Verbose = False,
) -> None:
    """Join a run and train with the others."""
    with errors_in_words(verbose=verbose), Stopping() as stopping:
        console = Terminal()
        source = options.read_source(run)
        options.check_machine("train", state_dir)
        link = options.read_bandwidth(bandwidth)
        options.check_invite_file(invite_file, is_reachable=not client_mode)
        options.check_sync(source, sync_args)
        from collab_core.session import open_session
        from collab_core.swarm import SwarmConfig

        config = SwarmConfig(
            role="trainer",
            initial_peers=tuple(initial_peers or ()),
            host_maddrs=tuple(host_maddrs or ()),
            announce_maddrs=tuple(announce_maddrs or ()),
            port=port,
            client_mode=client_mode,
            use_relay=use_relay,
            identity_path=identity_path,
            name=name or "",
        )
        if device not in ("auto", "cpu"):  # which may not be there
            from collab_trainer import pick_device

            pick_device(device)
        console.print("Joining the run…")
        with open_session(
            source, config, state_dir=state_dir, prepare=options.prepare, should_sync=sync_args
        ) as session:
            lines = EventLines(console)
            session.events.listen(lines)
            settings = session.manifest.settings
            with console.status("Loading…"):
                from collab_core.averaging.faults import FailAt
                from collab_core.files import replace_file
                from collab_trainer import Trainer, TrainerConfig, load_task, new_replica, pick_device
                from collab_trainer.device import describe
                from collab_trainer.gossip import GossipTrainer

                chosen = pick_device(device)
            console.print(f"Run [bold]{settings.name}[/bold], {session.manifest.run_id[:16]}, on {describe(chosen)}.")
            with console.status("Reading the data and building the model…"):
                task = load_task(settings.task, options.task_context(source, session, data_dir, needs_data=True))
                model = task.build_model()
            kind = GossipTrainer if settings.strategy.name == "gossip" else Trainer
            peer = kind(
                task=task,
                model=model,
                device=chosen,
                session=session,
                replica=new_replica(settings, model),
                config=TrainerConfig(
                    backup_every=backup_every,
                    bandwidth=link,
                    max_upload=options.bytes_per_second(max_upload),
                    max_epochs=epochs,
                    batch_size=batch_size,
                    accumulate_batches=accumulate_batches,
                    num_workers=n_workers,
                ),
                stop=stopping.when_asked(),
                fail_at=FailAt.from_environment(),
            )
            if (limit := time_limit(hours)) is not None:
                stopping.after(limit.seconds)
                session.events.write("time_limit", seconds=round(limit.seconds), reason=limit.reason)
            os.nice(nice)  # of this thread and those it starts: the network's go on as before, as others wait for them
            with showing(session, console, lines, state=lambda: peer.epoch):
                peer.enter()
                if session.swarm.addresses or invite_file is not None:
                    invite = session.invite().encode()
                    if invite_file is not None:
                        replace_file(invite_file.absolute(), invite.encode() + b"\n")
                    if not session.swarm.bootstrap_peers:
                        console.print("\nYou are the first. Others join with:\n")
                        console.print(f"collab train {invite}\n", style="bold cyan", soft_wrap=True)
                peer.run()
