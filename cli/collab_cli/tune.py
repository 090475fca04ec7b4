"""`collab tune`: which batch size this machine is fastest with, without joining."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    from collab_core.run import Invite, RunFolder
    from collab_core.run.settings import RunSettings
    from collab_trainer import TaskContext

BAR_CHARS = 24


def tune(
    run: Annotated[
        str, typer.Argument(help="The invite you were given, or the folder of a run.", metavar="INVITE|RUN")
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    data_dir: options.DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the batch size this machine is fastest with, as `collab train` does where none is given."""
    with errors_in_words(verbose=verbose), Stopping():
        console = Terminal(stderr=as_json)
        source = options.read_source(run)
        with console.status("Looking at the run and building its model…"):
            from collab_core.errors import Code, TaskError
            from collab_trainer import load_task, pick_device
            from collab_trainer.device import describe
            from collab_trainer.tuning import best_batch, largest_batch, train_with, try_batches

            settings, context = _look(source)
            chosen = pick_device(device)
            task = load_task(settings.task, replace(context, data_dir=data_dir or context.data_dir))
            model = task.build_model().to(chosen)
            rows = task.samples(next(task.blocks(seed=secrets.randbits(63), position=None)))
        with console.status("Trying batch sizes…"):
            trials = list(try_batches(task, model, rows, chosen, largest_batch(settings)))
        if not any(trial.samples_per_second for trial in trials):
            raise TaskError(
                Code.OUT_OF_MEMORY,
                f"Not even one sample fits into the memory of {describe(chosen)}.",
                fix="Join from a machine with more; `collab doctor` says how much it takes.",
            )
        best = best_batch(trials)
        batch_size = train_with(best, settings)
        if as_json:
            speeds = [{"batch_size": one.batch_size, "samples_per_second": one.samples_per_second} for one in trials]
            print_json({"device": describe(chosen), "batch_size": batch_size, "rows": best, "trials": speeds})
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("at once", "samples/s"):
            table.add_column(heading, justify="right")
        table.add_column("")
        fastest = max(trial.samples_per_second for trial in trials) or 1.0
        for trial in trials:
            bar = "━" * round(BAR_CHARS * trial.samples_per_second / fastest)
            speed = (
                f"{trial.samples_per_second:,.{0 if trial.samples_per_second >= 100 else 1}f}"
                if trial.samples_per_second
                else "does not fit"
            )
            table.add_row(str(trial.batch_size), speed, f"[green]{bar}[/green]" if trial.batch_size == best else bar)
        console.print(f"Run [bold]{settings.name}[/bold] on {describe(chosen)}:")
        console.print(table)
        words = f"`collab train` takes batches of {best} by itself here. To choose another: --batch-size N"
        if batch_size != best:
            words = f"A step of this run has {batch_size} samples. `collab train` takes {best} of them at once here."
        console.print(f"\n{words}")


def _look(source: Invite | RunFolder) -> tuple[RunSettings, TaskContext]:
    """The run's settings and files; of an invite, as a guest that nobody sees."""
    from collab_core.run import RunFolder
    from collab_trainer import TaskContext, collect_assets

    if isinstance(source, RunFolder):
        settings = source.settings()
        files = collect_assets(settings.task, source.path)
        return settings, TaskContext(assets=files, run_dir=source.path, data_dir=source.path, needs_data=True)
    from collab_core.doctor.visit import Visit

    with Visit(initial_peers=source.initial_peers, host_maddrs=(), port=None, client_mode=True) as visit:
        manifest, assets = visit.fetch_run(source)
    return manifest.settings, TaskContext(assets=assets, needs_data=True)
