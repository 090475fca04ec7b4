"""What all generated pages are made of."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

NOTE = "<!-- Made by docs/generate_reference.py from the code. Do not edit; run the script. -->"
MIN_GROUPED = 100_000  # larger numbers are easier to read in groups; a port is not


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def cell(text: str | None) -> str:
    return one_line(text or "").replace("|", "\\|").replace("<", "&lt;")


def one_line(text: str) -> str:
    return " ".join(text.split())


def number(value: float) -> str:
    whole = int(value) if value == int(value) else value
    if whole < MIN_GROUPED:
        return str(whole)
    return {2**63: "2^63", 2**63 - 1: "2^63 - 1"}.get(int(value), f"{whole:,}".replace(",", "\N{NO-BREAK SPACE}"))


def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """The string that stands under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                docs[name] = one_line(words)
    return docs
