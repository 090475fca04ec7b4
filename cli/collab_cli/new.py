"""`collab new`: a run file that is valid as it stands, and the organiser's key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collab_cli.failures import errors_in_words
from collab_cli.terminal import Terminal
from collab_core.templates import Template


def new(
    folder: Annotated[Path, typer.Argument(help="Folder to create; its name becomes the run's name.")],
    template: Annotated[
        Template,
        typer.Option(
            help="What to train: the built-in tiny GPT, any causal language model on your own text, or a task of your "
            "own, written as an example package."
        ),
    ] = Template.TINY_GPT,
) -> None:
    """Begin a run: write a commented run.toml, the organiser's key, and a page for people to join by."""
    with errors_in_words():
        from collab_core.run import RunFolder, run_template, template_files

        name = folder.absolute().name
        made = RunFolder.create(folder, run_template(name, template), template_files(name, template))
        console = Terminal()
        console.print(f"Created [bold]{made.run_file}[/bold]  the run: look through it, change what you like")
        console.print(f"Created [bold]{made.key_file}[/bold]  your key: keep it, show it to nobody")
        console.print(f"Created [bold]{made.join_file}[/bold]  a page for those who join: make it yours")
        if template is Template.CUSTOM:
            tell_about_task(console, folder)
        if template is Template.CAUSAL_LM:
            data = made.path / "data"
            console.print(f"\nPut text files into [bold]{data}[/bold], or change the data in the run file.")
        console.print("\nNext, on a machine that others can reach:\n")
        console.print(f"  collab aux {folder}", style="bold cyan")


def tell_about_task(console: Console, folder: Path) -> None:
    """What to do with the package of the task before others come."""
    task = folder / "task"
    console.print(f"Created [bold]{task}[/bold]  the task: an example package to change")
    console.print("\nInstall it, test it, and train with it on this machine:\n")
    for command in (f"pip install -e {task}", f"python -m pytest {task}", f"collab demo {folder}"):
        console.print(f"  {command}", style="bold cyan")
    console.print("\nThen make it yours. Everybody who takes part installs it.")
