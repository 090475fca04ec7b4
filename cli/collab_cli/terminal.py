"""Where commands print: a terminal or a pipe, whose reader may go away."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(Console):
    """Falls silent if nobody reads any more. What prints is often a thread that others need: it must go on.

    rich 15 ends the program instead, by an exception in whatever thread wrote last.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stderr if self.stderr else sys.stdout)


def visible(text: str) -> str:
    """Without characters that tell a terminal what to do: some of what is shown was written by strangers."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def print_json(document: Any) -> None:
    """One document on stdout; now, so that a reader who went away is noticed here."""
    print(json.dumps(_finite(document), indent=2), flush=True)


def _finite(value: Any) -> Any:
    """JSON knows no other numbers."""
    match value:
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case float() if not math.isfinite(value):
            return None
    return value


def silence(stream: IO[Any]) -> None:
    """From now on what is written there goes nowhere, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
