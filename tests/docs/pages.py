"""What the tests of the documentation have in common: the pages, their code blocks, the reference generator."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [ROOT / "core", ROOT / "trainer", ROOT / "aux_peer", ROOT / "dashboard", ROOT / "cli"]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLED_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line that a reader is told to type."""

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def pages() -> list[Path]:
    """Everything people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def commands(page: Path) -> list[Command]:
    """The lines that begin with `$ ` in the console blocks of a page."""
    blocks = [body for language, body in _FENCE.findall(page.read_text()) if language == "console"]
    return [Command(page, line[2:]) for body in blocks for line in body.splitlines() if line.startswith("$ ")]


@dataclass(frozen=True)
class File:
    """A file that a reader is told to write."""

    name: str
    text: str


def steps(page: Path) -> list[Command | File]:
    """What a page tells its reader to do, from top to bottom: commands, and code blocks that have a file as title."""
    found: list[Command | File] = []
    for language, title, body in _TITLED_FENCE.findall(page.read_text()):
        if language == "console":
            found += [Command(page, line[2:]) for line in body.splitlines() if line.startswith("$ ")]
        elif title:
            found.append(File(title, body))
    return found


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def generator(name: str = "generate_reference") -> ModuleType:
    """docs/generate_reference.py as a module, or a part of it."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))
