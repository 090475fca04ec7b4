"""Writes the reference pages that follow from the code: the commands and the run file.

python docs/generate_reference.py            writes docs/reference/cli.md and docs/reference/run-file.md
python docs/generate_reference.py --check    changes nothing; fails if a page is not what the code says
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from collab_cli.app import app
from collab_core.run import run_template
from collab_core.run.settings import RunSettings, Section
from collab_core.templates import Template
from collab_trainer.causal_lm import CausalLMOptions
from collab_trainer.tiny_gpt import TinyGPTOptions

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/generate_reference.py from the code. Do not edit; run the script. -->"
MIN_GROUPED = 100_000  # larger numbers are easier to read in groups; a port is not
ORDER = ("new", "aux", "train", "status", "watch", "sample", "dashboard", "doctor", "tune", "demo", "publish-model")


def pages() -> dict[Path, str]:
    """Every generated page with what it must hold."""
    return {REFERENCE / "cli.md": cli_page(), REFERENCE / "run-file.md": run_file_page()}


# --- the commands ---


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
        "failed.",
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
    yield from textwrap.wrap(_one_line(words), 118)
    yield ""
    yield "```text"
    takes = [usage] * bool(usage) + ["[OPTIONS]"] * bool(options)
    takes = takes[::-1] if usage.startswith("-- ") else takes  # what follows `--` is no option of ours
    yield " ".join([f"collab {name}", *takes])
    yield "```"
    yield ""
    rows = [(_cell(f"`{_argument_name(argument)}`"), _cell(argument.info.help)) for argument in arguments]
    yield from _table(("argument", "what it is"), rows)
    panels: dict[str, list[Parameter]] = {}
    for option in options:
        panels.setdefault(option.info.rich_help_panel or "Options", []).append(option)
    for panel in sorted(panels, key=lambda panel: panel == "Options"):
        yield ""
        yield f"**{panel}**"
        yield ""
        lines = [
            (_flags(option), _value(option), _default(option), _cell(option.info.help)) for option in panels[panel]
        ]
        yield from _table(("option", "value", "default", "what it does"), lines)


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
        text += f", {low:g} to {_number(high)}" if high is not None else f", {low:g} or more"
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


# --- the run file ---


def run_file_page() -> str:
    """One section per table of `run.toml`."""
    lines = [
        "# The run file",
        NOTE,
        "",
        "`collab new my-run` writes `my-run/run.toml` with every key at its default. All of it must be equal for every",
        "peer, so all of it goes into the signed manifest: change one value and it is another run with another invite.",
        "Unknown keys, wrong types and values out of range are errors that say what is allowed.",
    ]
    comments = _comments()
    for path, section in _sections(RunSettings, ()):
        lines += ["", f"## {f'[{path}]' if path else 'The top'}", "", *_section_table(section, path, comments)]
        if path == "task":
            lines += ["", "### [task.options] of tiny-gpt", ""]
            lines += _section_table(TinyGPTOptions, "task.options", comments)
            lines += ["", "### [task.options] of causal-lm", ""]
            for below, options in _tables(CausalLMOptions, "task.options"):
                lines += [] if options is CausalLMOptions else ["", f"#### {below}", ""]
                lines += _section_table(options, "", {})
            lines += ["", "### [task.options] of other packages", ""]
            lines += ["A task that is not built in has options of its own, checked in the same way: whoever writes it"]
            lines += ["[describes them](../tutorials/custom-task.md#2-the-task)."]
    lines += [
        "",
        "## What must agree",
        "",
        "- tiny-gpt: `task.options.width` must be a multiple of `task.options.heads`.",
        "- causal-lm: model, tokenizer and each source of data come from one place, and a `repo` has a `revision`.",
        "- causal-lm: `sequence_length` at most the model's `max_position_embeddings`, and no more tokens in the",
        "  tokenizer than its `vocab_size`.",
        "- `optimizer.decay_epochs` above 0 if and only if `optimizer.decay` is not `constant`.",
        '- `optimizer.momentum` above 0 only with `optimizer.name = "sgd"`; `optimizer.nesterov` only with momentum.',
        "- allreduce: `limits.max_samples_per_peer` at least `strategy.target_batch_size`: a peer that is alone must",
        "  be able to finish an epoch.",
        "- `strategy.local_steps`, `strategy.fragments`, `strategy.overlap_steps`, the codec `topk`, `strategy.keep`",
        '  and `[outer]` are only for `strategy.name = "diloco"`; `topk` needs `outer.momentum = 0`.',
        "- `optimizer.name` is `lamb` only with `allreduce`, `adamw8bit` only with `diloco`.",
        '- `strategy.codec = "none"` with `strategy.name = "gossip"`, and `[gossip]` only with it.',
        "",
        "## The file that `collab new` writes",
        "",
        "```toml",
        run_template("my-run").rstrip(),
        "```",
        "",
        "## What `collab new --template causal-lm` writes instead of `[task]`",
        "",
        "```toml",
        _task_of(run_template("my-run", Template.CAUSAL_LM)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _task_of(text: str) -> str:
    """What stands between `[task]` and `[strategy]`."""
    return text[text.index("[task]") : text.index("[strategy]")].rstrip()


def _tables(section: type[Section], path: str, *, is_list: bool = False) -> Iterator[tuple[str, type[Section]]]:
    """A task's options and the tables in them; a list of tables has double brackets. Each kind of table once."""
    yield f"[[{path}]]" if is_list else f"[{path}]", section
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from _tables(field.annotation, f"{path}.{name}")
        # data for evaluation is described like data for training
        elif path.count(".") == 1 and get_origin(field.annotation) is list:
            yield from _tables(get_args(field.annotation)[0], f"{path}.{name}", is_list=True)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _sections(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, type[Section]]]:
    yield ".".join(path), section
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _sections(field.annotation, (*path, name))


def _section_table(section: type[Section], path: str, comments: dict[str, str]) -> Iterator[str]:
    docs = _field_docs(section)
    schema = section.model_json_schema(ref_template="{model}")["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            continue
        words = docs.get(name) or comments.get(f"{path}.{name}".lstrip("."), "")
        default = "required" if field.is_required() else f"`{_toml(field.get_default(call_default_factory=True))}`"
        rows.append((f"`{name}`", _allowed(schema[name]), default, _cell(words)))
    yield _one_line(section.__doc__ or "")
    yield ""
    yield from _table(("key", "value", "default", "what it is"), rows)


def _field_docs(section: type[Section]) -> dict[str, str]:
    """The string that stands under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                docs[name] = _one_line(words)
    return docs


def _comments() -> dict[str, str]:
    """The comment behind each key of the template, for fields whose class says nothing."""
    section, comments = "", {}
    for line in run_template("my-run").splitlines():
        if heading := re.match(r"\[([a-z.]+)\]", line):
            section = heading[1]
        elif pair := re.match(r"(\w+) = .*?\s# (.+)", line):
            comments[f"{section}.{pair[1]}".lstrip(".")] = pair[2][0].upper() + pair[2][1:]
    return comments


def _allowed(schema: dict[str, Any]) -> str:
    if words := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{_toml(word)}`" for word in words)
    if "anyOf" in schema:
        return " or a ".join(_allowed(one) for one in schema["anyOf"])
    kinds = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "object": "table",
        "boolean": "true, false",
    }
    if schema["type"] == "array":
        return "list of tables" if "$ref" in schema["items"] else f"list of {kinds[schema['items']['type']]}"
    text = kinds[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        text += f", more than {schema['exclusiveMinimum']:g}"
    if low is not None:
        text += f", {low:g} to {_number(high)}" if high is not None else f", {low:g} or more"
    if "exclusiveMaximum" in schema:
        text += f", less than {_number(schema['exclusiveMaximum'])}"
    if "maxLength" in schema:
        text += f", at most {schema['maxLength']} characters"
    if "[0-9a-f]{64}" in schema.get("pattern", ""):
        text += ": 64 hex digits"
    elif "pattern" in schema and "maxLength" not in schema:
        text += ": 1 to 48 small letters, digits and hyphens"
    return text


def _number(value: float) -> str:
    whole = int(value) if value == int(value) else value
    if whole < MIN_GROUPED:
        return str(whole)
    return {2**63: "2^63", 2**63 - 1: "2^63 - 1"}.get(int(value), f"{whole:,}".replace(",", "\N{NO-BREAK SPACE}"))


def _toml(value: object) -> str:
    match value:
        case str():
            return f'"{value}"'
        case dict():
            return "{}"
        case bool():
            return str(value).lower()
        case _:
            return str(value)


# --- Markdown ---


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cell(text: str | None) -> str:
    return _one_line(text or "").replace("|", "\\|").replace("<", "&lt;")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    if arguments not in ([], ["--check"]):
        say(__doc__ or "")
        return 2
    wrong = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in wrong:
            say(f"{path.name} is not what the code says; run: python docs/generate_reference.py")
        return 1 if wrong else 0
    for path in wrong:
        path.write_text(pages()[path])
        say(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
