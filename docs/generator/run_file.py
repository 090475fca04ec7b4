"""The page of the run file, from the classes that check it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from generator.markdown import NOTE, cell, field_docs, number, one_line, table

from collab_core.run import run_template
from collab_core.run.settings import RunSettings, Section
from collab_core.templates import Template
from collab_trainer.causal_lm import CausalLMOptions
from collab_trainer.tiny_gpt import TinyGPTOptions


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
        lines += ["", f"## {f'[{path}]' if path else 'The top'}", "", *section_table(section, path, comments)]
        if path == "task":
            lines += ["", "### [task.options] of tiny-gpt", ""]
            lines += section_table(TinyGPTOptions, "task.options", comments)
            lines += ["", "### [task.options] of causal-lm", ""]
            for below, options in _tables(CausalLMOptions, "task.options"):
                lines += [] if options is CausalLMOptions else ["", f"#### {below}", ""]
                lines += section_table(options, "", {})
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
        '  and `[outer]` are only for `strategy.name = "diloco"`.',
        "- `strategy.keep` of 512 or less needs `outer.momentum = 0`.",
        "- `optimizer.name` is `adamw8bit` only with `diloco`.",
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


def section_table(section: type[Section], path: str, comments: dict[str, str]) -> Iterator[str]:
    docs = field_docs(section)
    schema = section.model_json_schema(ref_template="{model}")["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            continue
        words = docs.get(name) or comments.get(f"{path}.{name}".lstrip("."), "")
        default = "required" if field.is_required() else f"`{_toml(field.get_default(call_default_factory=True))}`"
        rows.append((f"`{name}`", _allowed(schema[name]), default, cell(words)))
    yield one_line(section.__doc__ or "")
    yield ""
    yield from table(("key", "value", "default", "what it is"), rows)


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
        text += f", {low:g} to {number(high)}" if high is not None else f", {low:g} or more"
    if "exclusiveMaximum" in schema:
        text += f", less than {number(schema['exclusiveMaximum'])}"
    if "maxLength" in schema:
        text += f", at most {schema['maxLength']} characters"
    if "[0-9a-f]{64}" in schema.get("pattern", ""):
        text += ": 64 hex digits"
    elif "pattern" in schema and "maxLength" not in schema:
        text += ": 1 to 48 small letters, digits and hyphens"
    return text


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
