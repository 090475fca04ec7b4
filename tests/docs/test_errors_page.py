"""Every error code has a section in the docs, with the title the terminal shows, and is raised somewhere."""

from __future__ import annotations

import ast
import re

import pytest
from pages import DOCS, SOURCES

from collab_core.errors import Code

PAGE = (DOCS / "reference" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (COLLAB-\d+)\n\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_code_has_one_section_in_order() -> None:
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == [str(code) for code in Code]


def test_numbers_are_unique_and_rise() -> None:
    numbers = [code.number for code in Code]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("code", Code, ids=str)
def test_section_has_the_title_and_says_what_why_and_how(code: Code) -> None:
    section = SECTIONS[str(code)]
    assert section.startswith(f"**{code.title}.**\n")
    for heading in ("**What happened.** ", "**Why.** ", "**What to do.** "):
        assert section.count(heading) == 1


def given_codes() -> set[str]:
    """Names of the codes that are given to an error somewhere: named, and not only compared with."""
    found = set()
    for path in (path for root in SOURCES for path in root.rglob("*.py") if path.name != "errors.py"):
        tree = ast.parse(path.read_text())
        compared = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Code" and id(node) not in compared:
                found.add(node.attr)
    return found


def test_every_code_is_raised_or_said_to_be_reserved() -> None:
    reserved = {code.name for code in Code if "This code is reserved" in SECTIONS[str(code)]}
    assert given_codes() | reserved == {code.name for code in Code}
    assert not given_codes() & reserved
