"""What is wrong with a run file, in a person's words: nothing of pydantic's vocabulary reaches the user."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from collab_core.errors import Code, ConfigError
from collab_core.run.settings import RunSettings, Section

NAME_RULE = "1 to 48 small letters, digits and hyphens, not beginning with a hyphen"
PACKAGE_RULE = "the name of a package, with versions if need be and no spaces, such as 'my-task>=1.0'"
OPTION_RULE = "text, a number, true or false, or a list or table of these"
MAX_OPTION_DEPTH = 8  # a manifest comes from a stranger; no task needs more


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend."""

    code: Code
    message: str
    fix: str

    def error(self, source: str, num_more: int) -> ConfigError:
        """The error to raise, saying where it was seen and how many other problems there are."""
        more = f" (and {num_more} more)" if num_more else ""
        return ConfigError(self.code, f"{source}: {self.message}{more}", fix=self.fix)


def model_problems(error: ValidationError) -> list[Problem]:
    """Unknown keys come first: a mistyped key is usually also the reason why another one is missing."""
    problems = [_problem(detail) for detail in error.errors(include_url=False)]
    return sorted(problems, key=lambda problem: problem.code is not Code.UNKNOWN_KEY)


def option_problems(options: Mapping[str, object]) -> Iterator[Problem]:
    """Options of a task go into the manifest, so they must be plain values that JSON keeps exactly."""
    for name, value in options.items():
        problem = _option_problem(("task", "options", name), name) or _option_problem(("task", "options", name), value)
        if problem is not None:
            yield problem


def _option_problem(path: tuple[str | int, ...], value: object) -> Problem | None:
    """The first thing in `value` that cannot be an option."""
    if len(path) - 2 > MAX_OPTION_DEPTH:
        return _bad_value(path, value, f"it is nested more than {MAX_OPTION_DEPTH} deep")
    if isinstance(value, dict):
        inside: list[tuple[tuple[str | int, ...], object]] = []
        for name, below in value.items():
            if not isinstance(name, str):  # neither TOML nor JSON can say that
                return _bad_value(path, value, "the names in it must be text")
            inside += [((*path, name), name), ((*path, name), below)]
    elif isinstance(value, list):
        inside = [((*path, index), below) for index, below in enumerate(value)]
    else:
        reason = _why_not_an_option(value)
        return None if reason is None else _bad_value(path, value, reason)
    return next((problem for where, below in inside if (problem := _option_problem(where, below))), None)


def option_reason(detail: ErrorDetails) -> str:
    """Why a task does not allow one of its options; of these only the task knows the type."""
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "value_error" | "assertion_error":
            return str(context["error"])
        case "literal_error":
            return f"it must be {context['expected']}"
        case "string_pattern_mismatch":
            return f"it must match {context['pattern']}"
        case _:
            return _reason(kind, detail["loc"], detail["input"], context)


def dotted(path: Sequence[str | int]) -> str:
    """`optimizer.lr`; a part that is no bare TOML key is quoted, so that it cannot hide in the terminal."""
    parts = (str(part) if re.fullmatch(r"[A-Za-z0-9_-]+", str(part)) else json.dumps(part) for part in path)
    return ".".join(parts)


def show_value(value: object, max_length: int = 80) -> str:
    """A value as a person would type it, short, with unprintable characters escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list):
        text = "[" + ", ".join(show_value(item, 20) for item in value[:10]) + (", …]" if len(value) > 10 else "]")
    elif isinstance(value, (datetime.date, datetime.time)):
        text = value.isoformat()
    else:
        text = repr(value)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _problem(detail: ErrorDetails) -> Problem:
    kind, path, value = detail["type"], detail["loc"], detail["input"]
    context = detail.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):  # invalid: not even text that UTF-8 can write
        return _unknown_key(path, value)
    if kind == "value_error":
        return Problem(Code.BAD_COMBINATION, f"{context['error']}.", "Change one of the two so that they agree.")
    if kind == "missing":
        return Problem(Code.BAD_VALUE, f"{dotted(path)} is missing.", f'Add a line such as {dotted(path)} = "my-run".')
    if not path:  # only JSON from a stranger gets here: a key of the top that UTF-8 cannot write
        return Problem(Code.UNKNOWN_KEY, f"{show_value(value)} is not a key that can be written.", "Remove the key.")
    return _bad_value(path, value, _reason(kind, path, value, context))


def _reason(kind: str, path: tuple[str | int, ...], value: object, context: Mapping[str, Any]) -> str:
    """The table from pydantic's error types to words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be a finite number"
    match kind:
        case "greater_than":
            return f"it must be greater than {_number(context['gt'])}"
        case "greater_than_equal":
            return f"it must be {_number(context['ge'])} or more"
        case "less_than":
            return f"it must be less than {_number(context['lt'])}"
        case "less_than_equal":
            return f"it must be {_number(context['le'])} or less"
        case "literal_error":
            allowed = _literals(path)
            words = f"it must be {_either([repr(word) for word in allowed])}"
            return words + (_did_you_mean(str(value).lower(), allowed) if isinstance(value, str) else "")
        case "string_pattern_mismatch":
            return f"it must be {PACKAGE_RULE if path[-1] == 'package' else NAME_RULE}"
        case "string_too_long":
            return f"it has {len(str(value))} characters, and at most {context['max_length']} are allowed"
        case "too_short" | "string_too_short":
            return f"it must have at least {context['min_length']}"
        case "int_type":
            return f"it must be a whole number, not {_kind(value)}"
        case "float_type":
            return f"it must be a number, not {_kind(value)}"
        case "bool_type":
            return f"it must be true or false, not {_kind(value)}"
        case "list_type":
            return f"it must be a list, not {_kind(value)}"
        case "string_type":
            return f"it must be text in quotes, not {_kind(value)}"
        case "model_type" | "dict_type":
            return f"it must be a table [{dotted(path)}], not {_kind(value)}"
        case _:
            return f"{_kind(value)} with this value cannot be used here"


def _why_not_an_option(item: object) -> str | None:
    if isinstance(item, str):
        return None if _is_writable(item) else "it must be text that UTF-8 can write"
    if isinstance(item, bool):
        return None
    if isinstance(item, int):
        return None if -(2**63) <= item < 2**63 else "it must fit in 64 bits"
    if isinstance(item, float):
        return None if math.isfinite(item) else "it must be a finite number"
    return f"it must be {OPTION_RULE}, not {_kind(item)}"


def _is_writable(text: str) -> bool:
    """JSON from a stranger can hold half a character, which no manifest can hold."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _bad_value(path: Sequence[str | int], value: object, reason: str) -> Problem:
    key = dotted(path)
    default = _default(path)
    known = "" if default is None else f" The default is {show_value(default)}."
    return Problem(Code.BAD_VALUE, f"{key} = {show_value(value)} is not allowed: {reason}.", f"Change {key}.{known}")


def _unknown_key(path: tuple[str | int, ...], value: object) -> Problem:
    *above, name = [str(part) for part in path]
    allowed = list(_section(above).model_fields)
    close = difflib.get_close_matches(name.lower(), allowed, n=1)
    elsewhere = [key for key in _all_keys() if key.split(".")[-1] == name]
    guesses = [dotted([*above, word]) for word in close] or elsewhere[:1]
    guess = f", did you mean {guesses[0]}?" if guesses else "."
    where = f"[{dotted(above)}]" if above else "The top of the file"
    return Problem(
        Code.UNKNOWN_KEY,
        f"{dotted(path)} = {show_value(value)} is unknown{guess} {where} may have: {', '.join(allowed)}.",
        f"Write {guesses[0]} instead, or remove the key." if guesses else "Remove the key, or choose one of these.",
    )


def _kind(value: object) -> str:
    # bool before int and datetime before date: each is a subclass of the other
    kinds: list[tuple[type, str]] = [
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number with a decimal point"),
        (str, "text"),
        (list, "a list"),
        (dict, "a table"),
        (datetime.datetime, "a date and time"),
        (datetime.date, "a date"),
        (datetime.time, "a time"),
    ]
    return next((words for kind, words in kinds if isinstance(value, kind)), "something else")


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _did_you_mean(seen: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(seen, allowed, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _section(path: Sequence[str | int]) -> type[Section]:
    section: type[Section] = RunSettings
    for part in path:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        section = annotation
    return section


def _literals(path: Sequence[str | int]) -> list[str]:
    annotation = _section(path[:-1]).model_fields[str(path[-1])].annotation
    assert get_origin(annotation) is Literal
    return list(get_args(annotation))


def _default(path: Sequence[str | int]) -> object | None:
    """The plain default of a key; None for tables, required keys and options of a task."""
    if list(path[:2]) == ["task", "options"]:
        return None
    default: object = _section(path[:-1]).model_fields[str(path[-1])].default
    return None if default is PydanticUndefined else default


def _all_keys(section: type[Section] = RunSettings, above: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _all_keys(field.annotation, (*above, name))
        else:
            yield dotted([*above, name])
