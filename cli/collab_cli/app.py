"""Wires the commands together; heavy imports happen inside them, so `--help` answers at once."""

from __future__ import annotations

import atexit
import os
import sys
import threading

import typer

from collab_cli import (
    aux,
    dashboard,
    demo,
    doctor,
    models,
    models_moving,
    new,
    publish_model,
    sample,
    status,
    train,
    tune,
    watch,
)

app = typer.Typer(
    name="collab",
    help="Train one model together, on the machines you have.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("new")(new.new)
app.command("aux")(aux.aux)
app.command("train")(train.train)
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.command("sample")(sample.sample)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
app.command("dashboard")(dashboard.dashboard)
app.command("publish-model")(publish_model.publish_model)
models.app.command("push")(models_moving.push)
models.app.command("pull")(models_moving.pull)
app.add_typer(models.app)


def _print_version(value: bool) -> None:
    if value:
        from collab_core import __version__

        print(f"collab {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Train one model together, on the machines you have."""


def main() -> None:
    """Run a command, and end with its exit code whatever threads still do.

    Python would stop a thread in the middle of torch or arrow while it takes itself down, which they take for a crash
    and abort us. So we go once all that is called at the end was called, and before that.
    """
    code = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # who is the first to register is the last to be called
    try:
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if any(thread.daemon and thread.name.startswith("collab-") for thread in threading.enumerate()):
            leave()  # nor is a library waited for that one of ours waits for
        raise
