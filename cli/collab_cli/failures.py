"""Errors as people see them: a box with a code, what happened and what to do; never a traceback."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator

import typer
from rich.panel import Panel
from rich.text import Text

from collab_cli.terminal import Terminal, silence, visible
from collab_core.errors import Code, CollabError, TaskError
from collab_core.memory import is_out_of_memory


def show_error(error: CollabError) -> None:
    """Print the box on stderr."""
    console = Terminal(stderr=True)
    body = Text(visible(error.message))
    body.append("\n\n→ ", style="bold")
    body.append(visible(error.fix))
    console.print(Panel(body, title=f"{error.code} · {error.code.title}", title_align="left", border_style="red"))


@contextlib.contextmanager
def errors_in_words(*, verbose: bool = False) -> Iterator[None]:
    """Map every way a command can end to an exit code: 0 stopped by a person, 2 their mistake, else a failed run."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.ERROR,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if not verbose:
        for chatty in ("hivemind", "asyncio", "transformers"):
            logging.getLogger(chatty).setLevel(logging.CRITICAL)
    try:
        yield
    except CollabError as error:
        if verbose and isinstance(error, TaskError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # in somebody else's code: its author wants to see it
        show_error(error)
        raise typer.Exit(error.exit_code) from None
    except typer.Exit:
        raise  # somebody has already said why
    except KeyboardInterrupt:
        Terminal(stderr=True).print("Stopped.")
        raise typer.Exit(0) from None
    except BrokenPipeError:
        # whoever read our output went away (`collab status ... | head`): not an error
        silence(sys.stdout)
        raise typer.Exit(0) from None
    except Exception as error:  # noqa: BLE001 - the last line of defence against tracebacks
        if verbose:
            traceback.print_exc()
        if is_out_of_memory(error):
            show_error(
                CollabError(
                    Code.OUT_OF_MEMORY,
                    f"There is not enough memory here ({' '.join(str(error).split())[:200] or type(error).__name__}).",
                    fix="End other programs, or join from a machine with more; `collab doctor` says how much it takes.",
                )
            )
            raise typer.Exit(2) from None
        place = traceback.extract_tb(error.__traceback__)[-1]
        show_error(
            CollabError(
                Code.INTERNAL,
                f"{type(error).__name__}: {error} (in {os.path.basename(place.filename)}, line {place.lineno}).",
                fix="This is a bug in Collab. Run again with --verbose and report what it prints.",
            )
        )
        raise typer.Exit(1) from None
