"""`collab demo`: a whole run on this machine, with real processes and sockets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from collab_cli import options
from collab_cli.chart import Curve, draw
from collab_cli.failures import errors_in_words
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    import torch

    from collab_cli.local_swarm import LocalPeer, LocalSwarm
    from collab_core.state.replica import Replica
    from collab_trainer import Task

CHART_SHARE = 4  # of the terminal's height


def demo(
    run: Annotated[
        str | None, typer.Argument(help="Folder of a run; the built-in one if left out.", metavar="RUN")
    ] = None,
    peers: Annotated[int, typer.Option(min=1, max=32, help="Number of trainers.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to train.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the built-in run.")] = 0,
    data_dir: options.DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show more when something fails.")] = False,
) -> None:
    """Train together with yourself: one auxiliary peer and some trainers, all on this machine."""
    with (
        errors_in_words(verbose=verbose),
        Stopping(),
        tempfile.TemporaryDirectory(prefix="collab-demo-", ignore_cleanup_errors=True) as folder,
    ):
        from collab_cli.local_swarm import LocalSwarm
        from collab_core.run import RunFolder

        console = Terminal(stderr=as_json)
        place = Path(folder)
        run_folder = RunFolder(Path(run)) if run is not None else built_in_run(place / "run", seed)
        settings = run_folder.settings()
        data = (data_dir or run_folder.path).absolute()
        swarm = LocalSwarm(
            run_folder.path,
            place,
            data_dir=data,
            num_trainers=peers,
            epochs=epochs,
            verbose=verbose,
            keeps_models=settings.strategy.name == "gossip",
        )
        started = time.monotonic()
        curve = Curve()
        try:
            with console.status(f"Starting one auxiliary peer and {peers} trainer{'s' * (peers > 1)}…"):
                swarm.start()
            show(swarm, curve, console, epochs)
            if console.is_terminal:
                console.print(picture(swarm, curve, console, epochs))
        finally:
            with console.status("Stopping everyone…"):
                swarm.stop()
        seconds = time.monotonic() - started
        with console.status("Looking at the trained model…"):
            report = summarise(swarm, run_folder, data, seconds)
        report = {"run_id": report.pop("run_id"), "strategy": settings.strategy.name, **report}
        if as_json:
            print_json(report)
        else:
            tell(console, report, run)


def built_in_run(folder: Path, seed: int) -> Any:
    """The run of the template, with another seed if wanted."""
    from collab_core.run import RunFolder, run_template

    text = run_template("demo")
    assert "\nseed = 0" in text
    return RunFolder.create(folder, text.replace("\nseed = 0", f"\nseed = {seed}", 1))


def show(swarm: LocalSwarm, curve: Curve, console: Console, epochs: int) -> None:
    """A live table while it runs; plain lines where there is no terminal."""
    if not console.is_terminal:
        for events in swarm.watch():
            for epoch in added(curve, events):
                console.print(f"epoch {epoch:>4} of {epochs}  loss {curve.loss(epoch):.3f}")
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        for events in swarm.watch():
            added(curve, events)
            live.update(picture(swarm, curve, console, epochs))


def added(curve: Curve, events: list[dict[str, Any]]) -> list[int]:
    """Take new epoch events; returns the epochs seen for the first time."""
    return [
        event["epoch"] for event in events if event["loss"] is not None and curve.add(event["epoch"], event["loss"])
    ]


def picture(swarm: LocalSwarm, curve: Curve, console: Console, epochs: int) -> Group:
    """The loss by epoch, and who is where."""
    chart = Text("\n".join(draw(curve.values(), console.width, max(console.height // CHART_SHARE, 4))), "cyan")
    return Group(chart, "", table(swarm, epochs))


def table(swarm: LocalSwarm, epochs: int) -> Table:
    """Who is where."""
    result = Table(box=None, pad_edge=False)
    for heading in ("name", "role", "epoch", "loss", "samples", "s/epoch", "root"):
        result.add_column(heading, justify="left" if heading in ("name", "role", "root") else "right", no_wrap=True)
    for peer in swarm.peers:
        if peer.role == "aux":
            peer.read_events()
        joined, epoch = peer.last("joined"), peer.last("epoch") or peer.last("round")
        name = escape(joined["name"]) if joined else "[dim]starting…[/dim]"
        if epoch is None:
            result.add_row(name, peer.role, f"0/{epochs}", "", "", "", "")
            continue
        mine = contributed(peer, joined["name"]) if joined else 0
        loss = "" if epoch["loss"] is None else f"{epoch['loss']:.3f}"
        progress = f"{epoch['epoch']}/{epochs}"
        root = epoch.get("root", "")[:12]
        result.add_row(name, peer.role, progress, loss, str(mine), f"{epoch['seconds']:.1f}", root)
    return result


def contributed(peer: LocalPeer, name: str) -> int:
    """Samples of a trainer in the epochs so far."""
    alone: list[int] = [event["samples"] for event in peer.events if event["event"] == "round"]
    together: list[int] = [event["members"].get(name, 0) for event in peer.events if event["event"] == "epoch"]
    return sum(alone) + sum(together)


def summarise(swarm: LocalSwarm, run_folder: Any, data_dir: Path, seconds: float) -> dict[str, Any]:
    """What came of it: the last state, judged on held-out data, and everyone's last words."""
    from collab_core.errors import Code, RunError
    from collab_core.run import fingerprint
    from collab_core.state.backup import read_backup
    from collab_trainer import TaskContext, load_task, new_replica, prepare

    signed = run_folder.signed_manifest(prepare)
    manifest = signed.open(None, fingerprint(signed.claimed_organiser))
    assets = run_folder.assets.read(manifest.assets)
    context = TaskContext(assets=assets, run_dir=run_folder.path, data_dir=data_dir)
    task = load_task(manifest.settings.task, context)
    model = task.build_model()
    replica = new_replica(manifest.settings, model)
    first = _loss(task, model)
    is_gossip = manifest.settings.strategy.name == "gossip"
    backups = []
    for keeper in swarm.trainers if is_gossip else [swarm.auxiliary]:
        if (backup := read_backup(keeper.folder / "backup.collab", manifest.run_id)) is None:
            raise RunError(Code.PEER_FAILED, f"{keeper.folder.name} kept no state.", fix="Run again with --verbose.")
        backups.append(backup)
    distance = _distance(replica, [backup.tensors for backup in backups])
    for name, view in replica.layout.views(replica.values).items():
        view.copy_(backups[0].tensors[f"model/{name}"])
    replica.layout.write(model, replica.values)
    people = []
    for peer in swarm.peers:
        joined, left = peer.last("joined"), peer.last("left")
        if joined is None or left is None:
            raise RunError(
                Code.PEER_FAILED, f"The peer {peer.folder.name} never finished.", fix="Run again with --verbose."
            )
        people.append(
            {
                "peer_id": joined["peer_id"],
                "name": joined["name"],
                "role": peer.role,
                "epoch": left["epoch"],
                "samples": left["samples"],
                "loss": left["loss"],
                "model_root": left["root"],
            }
        )
    if not is_gossip and len({(person["epoch"], person["model_root"]) for person in people}) != 1:
        listed = "; ".join(f"{person['name']}: epoch {person['epoch']}, {person['model_root']}" for person in people)
        raise RunError(
            Code.PEER_FAILED, f"The peers did not end with the same model: {listed}.", fix="This is a bug; report it."
        )
    return {
        "run_id": manifest.run_id,
        "epochs": int(backups[0].tensors["run/epoch"].item()),
        "seconds": round(seconds, 1),
        "loss": {"first": first, "last": _loss(task, model), "floor": task.floor},
        "model_root": None if is_gossip else backups[0].root,
        "distance": distance if is_gossip else None,
        "peers": people,
        "sample": task.sample(model),
    }


def _distance(initial: Replica, states: list[Mapping[str, torch.Tensor]]) -> float:
    """The greatest squared distance between two of the models, relative to how far both have come."""
    moves = []
    for tensors in states:
        values = initial.values.clone()
        for name, view in initial.layout.views(values).items():
            view.copy_(tensors[f"model/{name}"])
        moves.append(values.double() - initial.values.double())
    pairs = combinations(moves, 2)
    return max((float(((a - b) ** 2).sum() / ((a**2).sum() + (b**2).sum())) for a, b in pairs), default=0.0)


def _loss(task: Task, model: torch.nn.Module) -> float | None:
    """The loss on held-out text; None if so little text is there that none of it was held out."""
    from collab_core.errors import Code, TaskError

    try:
        return task.evaluate(model)
    except TaskError as error:
        if error.code is not Code.NO_DATA:
            raise
        return None


def tell(console: Console, report: dict[str, Any], run: str | None) -> None:
    """The same report for people, and what to type next."""
    loss = report["loss"]
    floor = "" if loss["floor"] is None else f"  (nobody can get below {loss['floor']:.3f})"
    console.print(f"\n[bold]{report['epochs']} epochs in {report['seconds']:.0f} s.[/bold]")
    if loss["last"] is None:
        console.print("No data was held out to measure the loss on; see [task.options.evaluation].", markup=False)
    else:
        console.print(f"Loss on data nobody trained on: {loss['first']:.3f} → [bold]{loss['last']:.3f}[/bold]{floor}")
    total = sum(person["samples"] for person in report["peers"]) or 1
    for person in report["peers"]:
        if person["role"] == "trainer":
            share = person["samples"] / total
            console.print(f"  {escape(person['name']):<18} {person['samples']:>7} samples  {share:>4.0%}")
        else:
            did = "let the others in" if report["model_root"] is None else "reduced for the others and kept the state"
            console.print(f"  {escape(person['name']):<18} {did}")
    if report["model_root"] is None:
        console.print(f"The models are {report['distance'] ** 0.5:.2%} apart, of the way they have come; this is one.")
    else:
        console.print(f"All {len(report['peers'])} hold the same model, bit for bit: {report['model_root'][:24]}…")
    console.print("\nWhat it can do by now:\n")
    for line in report["sample"].splitlines():
        console.print(f"  {escape(line)}", soft_wrap=True)
    console.print("\nNext, a run of your own that others can join:\n" if run is None else "\nNext, with others:\n")
    console.print("  collab new my-run" if run is None else f"  collab aux {escape(run)}", style="bold cyan")
