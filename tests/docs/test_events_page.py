"""The events page lists every event the code writes, with its fields; both are read from the source."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pages import DOCS, SOURCES

PAGE = (DOCS / "reference" / "events.md").read_text()


@dataclass
class Written:
    """Fields of one kind of event: those each call has, and those it may have."""

    certain: set[str] = field(default_factory=set)
    possible: set[str] = field(default_factory=set)


def documented() -> dict[str, set[str]]:
    """Event kinds of the page with their fields."""
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {kind: set(re.findall(r"`(\w+)`", "".join(_first_cells(body)))) for kind, body in sections}


def _first_cells(body: str) -> Iterator[str]:
    return (line.split("|")[1] for line in body.splitlines() if line.startswith("| `"))


def written() -> dict[str, Written]:
    """Event kinds of the code with their fields."""
    found: dict[str, Written] = defaultdict(Written)
    for path in (path for root in SOURCES for path in root.rglob("*.py")):
        module = ast.parse(path.read_text())
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if _writes_event(node)):
                assert isinstance(call, ast.Call)
                certain, possible = _fields(call, module)
                for kind in _kinds(call, function):
                    found[kind].certain |= certain
                    found[kind].possible |= certain | possible
    return found


def _writes_event(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and re.search(r"(^|[._])events\.write$", ast.unparse(node.func)) is not None


def _kinds(call: ast.Call, function: ast.FunctionDef) -> list[str]:
    match call.args:
        case [ast.Constant(value=str(kind))]:
            return [kind]
        case [ast.Name()]:  # `for event, ... in events`: the kinds were put into a list of tuples just before
            tuples = (node for node in ast.walk(function) if isinstance(node, ast.Tuple) and node.elts)
            kinds = [first.value for node in tuples if isinstance(first := node.elts[0], ast.Constant)]
            assert kinds
            return [str(kind) for kind in kinds]
    raise AssertionError(f"this test cannot read the event of line {call.lineno}; teach it")


def _fields(call: ast.Call, module: ast.Module) -> tuple[set[str], set[str]]:
    certain = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    possible: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg is None:  # `**facts`: a dictionary written out somewhere in the module
            assert isinstance(keyword.value, ast.Name)
            for value in _assigned(keyword.value.id, module):
                if isinstance(value, ast.Dict):
                    certain |= _keys(value)
                for part in ast.walk(value):
                    possible |= _keys(part) if isinstance(part, ast.Dict) else set()
    return certain, possible


def _assigned(name: str, module: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value


def _keys(dictionary: ast.Dict) -> set[str]:
    return {key.value for key in dictionary.keys if isinstance(key, ast.Constant)}


def test_every_event_of_the_code_is_on_the_page_and_no_other() -> None:
    assert sorted(documented()) == sorted(written())


def test_every_field_is_on_the_page_and_no_other() -> None:
    on_page = documented()
    for kind, fields in written().items():
        assert fields.certain <= on_page[kind], f"{kind}: fields missing from the page"
        assert on_page[kind] <= fields.possible, f"{kind}: fields that the code does not write"
