"""Wires the commands together; heavy imports happen inside them, so `--help` answers at once."""

from __future__ import annotations

import typer

from collab_cli import aux, demo, models, new, publish_model, status, train

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
app.command("publish-model")(publish_model.publish_model)
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
    app()
