"""Where commands print: a terminal or a pipe, whose reader may go away."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from rich.console import Console


class Terminal(Console):
    """Falls silent if nobody reads any more. What prints is often a thread that others need: it must go on.

    rich 15 ends the program instead, by an exception in whatever thread wrote last.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stderr if self.stderr else sys.stdout)


def silence(stream: IO[Any]) -> None:
    """From now on what is written there goes nowhere, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
