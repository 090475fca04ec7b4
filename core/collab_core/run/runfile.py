"""Reading `run.toml`, the human's file: strictly, and with an error that says what to type instead."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from collab_core.errors import Code, ConfigError
from collab_core.run.problems import Problem, model_problems, option_problems
from collab_core.run.settings import RunSettings

RUN_FILE = "run.toml"
MAX_RUN_FILE_BYTES = 256 * 1024  # a typo such as /dev/zero must end in words, not in a full memory


def load_run_file(path: Path) -> RunSettings:
    """Read a run file.

    Args:
        path: the run file, or the folder that holds `run.toml`.

    Raises:
        ConfigError: it cannot be read, is not TOML, or says something a run cannot be.
    """
    file = path / RUN_FILE if os.path.isdir(path) else path
    return parse_settings(_parse_toml(_read(file), file), str(file))


def parse_settings(data: Mapping[str, object], source: str) -> RunSettings:
    """Turn parsed TOML or JSON into settings, or say what the first problem is.

    Args:
        data: what was read.
        source: where it was read, for the message.

    Raises:
        ConfigError: UNKNOWN_KEY, BAD_VALUE or BAD_COMBINATION.
    """
    problems: list[Problem] = []
    settings: RunSettings | None = None
    try:
        settings = RunSettings.model_validate(dict(data))
    except ValidationError as error:
        problems += model_problems(error)
    task = data.get("task")
    options = task.get("options") if isinstance(task, Mapping) else None
    if isinstance(options, Mapping):
        problems += option_problems(options)
    if settings is None or problems:
        raise problems[0].error(source, num_more=len(problems) - 1)
    return settings


def _read(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_RUN_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            Code.RUN_NOT_FOUND,
            f"There is no run file at {str(file)!r}.",
            fix="Make one with `collab new NAME`, or give the folder that holds run.toml.",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = str(getattr(error, "strerror", None) or error)
        raise _unreadable(file, reason) from None
    if len(data) > MAX_RUN_FILE_BYTES:
        raise _unreadable(file, f"it is larger than {MAX_RUN_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")  # Windows' Notepad begins files with a byte order mark
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"byte {error.start} is not UTF-8 text") from None


def _unreadable(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        Code.RUN_NOT_FOUND,
        f"The run file {str(file)!r} cannot be read: {reason}.",
        fix="Give a run.toml saved as UTF-8 text that you may read, or make a new one with `collab new NAME`.",
    )


def _parse_toml(text: str, file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: numbers and nesting without end
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(
            Code.RUN_NOT_TOML,
            f"{file} is not valid TOML: {reason}.",
            fix="Mend that line: text needs quotes, and every line is `key = value` or `[section]`.",
        ) from None
