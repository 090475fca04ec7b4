"""`collab publish-model`: put the initial model where others find it, and pin it in the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collab_cli.failures import errors_in_words
from collab_cli.terminal import Terminal


def publish_model(
    run: Annotated[Path, typer.Argument(help="Folder of the run (made by `collab new`).", metavar="RUN")],
    to: Annotated[str, typer.Option(help="owner/name on the Hub, or a new folder: ./folder", metavar="REPO|DIR")],
    private: Annotated[
        bool, typer.Option("--private/--public", help="Who may see a repository that is made for this.")
    ] = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show more when something fails.")] = False,
) -> None:
    """Publish the initial model, tokenizer, config and a card, in one commit, and pin them in the run file."""
    with errors_in_words(verbose=verbose):
        from collab_core.errors import Code, ConfigError
        from collab_core.hub import make_repository
        from collab_core.run import RunFolder
        from collab_core.run.pinning import pin_model

        console = Terminal()
        target = read_target(to)
        folder = RunFolder(run)
        settings = folder.settings()
        if settings.task.name != "causal-lm":
            raise ConfigError(
                Code.BAD_OPTION,
                f"The task of this run is {settings.task.name!r}, and only causal-lm has a model to publish.",
                fix="Begin one with `collab new NAME --template causal-lm`.",
            )
        if isinstance(target, str):
            with console.status("Asking the Hub…"):
                make_repository(target, is_private=private)
        with console.status("Preparing the model…"):
            from collab_trainer import TaskContext, collect_assets, load_task
            from collab_trainer.causal_lm import CausalLM
            from collab_trainer.causal_lm.publish import publish_to_folder, publish_to_hub

            assets = collect_assets(settings.task, folder.path)
            task = load_task(settings.task, TaskContext(assets=assets, run_dir=folder.path))
            assert isinstance(task, CausalLM)
        with console.status("Publishing…"):
            if isinstance(target, Path):
                published = publish_to_folder(task, settings, target, folder.path)
            else:
                published = publish_to_hub(task, settings, target)
        pin_model(folder, published.pins)
        console.print(f"Published [bold]{published.place}[/bold]", soft_wrap=True)
        console.print(f"Pinned it in [bold]{folder.run_file}[/bold], with the root {published.pins['root'][:16]}…")
        if folder.manifest_file.exists():
            console.print("The run was signed before: it is a new run now, and gets a new invite.")
        console.print("\nNext, on a machine that others can reach:\n")
        console.print(f"  collab aux {run}", style="bold cyan")


def read_target(text: str) -> Path | str:
    """A folder, or the name of a repository on the Hub."""
    from collab_core.errors import Code, ConfigError
    from collab_core.hub import is_hub_name
    from collab_core.run.pinning import new_folder

    if text.startswith("file:"):
        return new_folder(Path(text.removeprefix("file://").removeprefix("file:")))
    if text.startswith((".", "/", "~")) or Path(text).is_dir():
        return new_folder(Path(text))
    if is_hub_name(text):
        return text
    raise ConfigError(
        Code.BAD_OPTION,
        f"--to {text!r} is neither a repository on the Hub nor a folder.",
        fix="Give owner/name for the Hub, or a folder that begins with ./ or /",
    )
