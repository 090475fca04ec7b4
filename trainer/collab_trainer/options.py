"""A task's options, read strictly; what is wrong with one is said in a person's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from collab_core.errors import Code, TaskError
from collab_core.run.problems import dotted, option_reason, show_value
from collab_core.run.settings import Section, TaskSettings

Options = TypeVar("Options", bound=Section)


def read_options(settings: TaskSettings, options_type: type[Options]) -> Options:
    """A task's options, checked.

    Raises:
        TaskError: an option is unknown, or has a value that is not allowed. Only the first one is named.
    """
    try:
        return options_type.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path, value = first["loc"], first["input"]
    is_pair = first["type"] in ("value_error", "assertion_error") and isinstance(value, dict)
    above = path if is_pair else path[:-1]
    section = _section(options_type, above)
    known = list(section.model_fields)
    guess = ""
    if is_pair:  # two options contradict each other: the message names both
        where = f"[{dotted(['task', 'options', *path])}]: " if path else ""
        message = f"{where}{option_reason(first)}."
    elif first["type"] == "missing":
        message = f"The task {settings.name} needs the option {dotted(path)!r}."
    elif first["type"] == "extra_forbidden":
        guess = did_you_mean(str(path[-1]), known)
        message = f"The task {settings.name} has no option {dotted(path)!r} (seen: {_seen(path, value)})."
    else:
        allowed = _whole_number(section, path) or option_reason(first)
        message = f"The option {_seen(path, value)} of the task {settings.name} is not allowed: {allowed}."
    table = dotted(["task", "options", *(part for part in above if isinstance(part, str))])
    what = "options" if section is options_type else "keys"
    fix = f"{guess}Change [{table}] in run.toml; the {what} of {settings.name} are: {', '.join(known)}."
    raise TaskError(Code.BAD_TASK_OPTION, message, fix=fix)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A guess with a space after it, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def _seen(path: Sequence[str | int], value: object) -> str:
    return f"{dotted(path)} = {show_value(value)}"


def _section(section: type[Section], path: Sequence[str | int]) -> type[Section]:
    """The table that a path leads to; numbers are places in a list of tables."""
    for part in path:
        if isinstance(part, str) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            below = next((kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)), None)
            if below is None:
                break
            section = below
    return section


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _whole_number(section: type[Section], path: Sequence[str | int]) -> str | None:
    """Both bounds at once, which a single violation does not tell."""
    schema = section.model_json_schema()["properties"].get(str(path[-1]), {})
    if schema.get("type") == "integer" and "minimum" in schema and "maximum" in schema:
        return f"it must be a whole number from {schema['minimum']} to {schema['maximum']}"
    return None
