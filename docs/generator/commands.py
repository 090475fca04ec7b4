"""The page of the commands, from their signatures."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from generator.markdown import NOTE, cell, number, one_line, table
from typer.models import ArgumentInfo, OptionInfo

from collab_cli.app import app

ORDER = ("new", "aux", "train", "status", "watch", "sample", "dashboard", "doctor", "tune", "demo", "publish-model")


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a command. Read from the signature: typer's own classes change between versions."""

    name: str
    kind: Any
    default: Any
    info: OptionInfo | ArgumentInfo

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, OptionInfo)

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def flags(self) -> tuple[list[str], list[str]]:
        """What turns it on (or takes the value), and what turns it off."""
        on, off = [], []
        # in `Annotated[..., typer.Option("--json", "-j")]` the first name takes the place of the default
        first_name = [self.info.default] if isinstance(self.info.default, str) else []
        declarations = [*first_name, *(self.info.param_decls or [])] or [f"--{self.name.replace('_', '-')}"]
        for declared in declarations:
            first, _, second = declared.partition("/")
            on.append(first)
            off += [second] if second else []
        return on, off


def commands() -> dict[str, list[Parameter]]:
    """Every command with what it takes, in the order of the page."""
    found = _callbacks()
    alone = [name for name in found if " " not in name]
    assert sorted(alone) == sorted(ORDER), "a command is missing from ORDER, or gone"
    ordered = [*ORDER, *(name for name in found if name not in ORDER)]
    return {name: list(_parameters(found[name])) for name in ordered}


def _callbacks() -> dict[str, Any]:
    """Every command's function; those of a group as `group command`."""
    found: dict[str, Any] = {str(info.name): info.callback for info in app.registered_commands}
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        found |= {f"{inner.info.name} {info.name}": info.callback for info in inner.registered_commands}
    return found


def _parameters(callback: Any) -> Iterator[Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        annotated, info = get_args(hints[name])
        kinds = [kind for kind in get_args(annotated) if kind is not type(None)]
        is_optional = isinstance(annotated, UnionType)
        yield Parameter(name, kinds[0] if is_optional else annotated, parameter.default, info)


def cli_page() -> str:
    """One section per command."""
    helps = {name: inspect.getdoc(callback) or "" for name, callback in _callbacks().items()}
    lines = [
        "# Commands",
        NOTE,
        "",
        "Every command answers `--help` with what stands here. It exits with 0 when it is done or was stopped by a",
        "person, with 2 when the person can mend what is wrong (see [Errors](errors.md)), and with 1 when the run",
        "failed; with 3 when it was asked to leave and could not within 9 s, with 130 after a second Ctrl-C.",
        "",
        "Settings that must be the same for everyone are in the [run file](run-file.md). Options are the business of",
        "whoever types them.",
    ]
    for name, parameters in commands().items():
        lines += ["", *command_section(name, helps[name], parameters)]
    return "\n".join(lines) + "\n"


def command_section(name: str, words: str, parameters: list[Parameter]) -> Iterator[str]:
    """What one command takes."""
    arguments = [parameter for parameter in parameters if not parameter.is_option]
    options = [parameter for parameter in parameters if parameter.is_option]
    usage = " ".join(_argument_name(argument) for argument in arguments)
    yield f"## collab {name}"
    yield ""
    yield from textwrap.wrap(one_line(words), 118)
    yield ""
    yield "```text"
    takes = [usage] * bool(usage) + ["[OPTIONS]"] * bool(options)
    takes = takes[::-1] if usage.startswith("-- ") else takes  # what follows `--` is no option of ours
    yield " ".join([f"collab {name}", *takes])
    yield "```"
    yield ""
    rows = [(cell(f"`{_argument_name(argument)}`"), cell(argument.info.help)) for argument in arguments]
    yield from table(("argument", "what it is"), rows)
    panels: dict[str, list[Parameter]] = {}
    for option in options:
        panels.setdefault(option.info.rich_help_panel or "Options", []).append(option)
    for panel in sorted(panels, key=lambda panel: panel == "Options"):
        yield ""
        yield f"**{panel}**"
        yield ""
        lines = [(_flags(option), _value(option), _default(option), cell(option.info.help)) for option in panels[panel]]
        yield from table(("option", "value", "default", "what it does"), lines)


def _argument_name(argument: Parameter) -> str:
    name = str(argument.info.metavar or argument.name).strip("[]").upper()
    return name if argument.default is inspect.Parameter.empty else f"[{name}]"


def _flags(option: Parameter) -> str:
    on, off = (", ".join(f"`{flag}`" for flag in flags) for flags in option.flags)
    return f"{on} / {off}" if off else on


def _value(option: Parameter) -> str:
    if option.is_flag:
        return ""
    is_list = get_origin(option.kind) is list
    kind = get_args(option.kind)[0] if is_list else option.kind
    if issubclass(kind, Enum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    text = {int: "whole number", float: "number", str: "text", Path: "path"}[kind]
    low, high = option.info.min, option.info.max
    if low is not None:
        text += f", {low:g} to {number(high)}" if high is not None else f", {low:g} or more"
    return text + (", may be repeated" if is_list else "")


def _default(option: Parameter) -> str:
    if option.default is inspect.Parameter.empty:
        return "required"
    if option.is_flag:
        on, off = option.flags
        names = on if option.default else off
        return f"`{names[0]}`" if names else "off"
    default = option.default.value if isinstance(option.default, Enum) else option.default
    return "" if default is None else f"`{default}`"
