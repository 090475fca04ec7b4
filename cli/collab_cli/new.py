"""`collab new`: a run file that is valid as it stands, and the organiser's key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collab_cli.failures import errors_in_words


def new(
    folder: Annotated[Path, typer.Argument(help="Folder to create; its name becomes the run's name.")],
) -> None:
    """Begin a run: write a commented run.toml and the organiser's key."""
    with errors_in_words():
        from collab_core.run import RunFolder, run_template

        made = RunFolder.create(folder, run_template(folder.absolute().name))
        console = Console(highlight=False)
        console.print(f"Created [bold]{made.run_file}[/bold]  the run: look through it, change what you like")
        console.print(f"Created [bold]{made.key_file}[/bold]  your key: keep it, show it to nobody")
        console.print("\nNext, on a machine that others can reach:\n")
        console.print(f"  collab aux {folder}", style="bold cyan")
