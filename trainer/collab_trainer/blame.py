"""Mistakes in the code of a task, in words: which method of which class failed, with what, and where."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

from collab_core.errors import Code, CollabError, TaskError
from collab_core.memory import is_out_of_memory

MAX_REASON_CHARS = 500


@contextlib.contextmanager
def blaming(task_name: str, what: str, *, code: Code = Code.TASK_FAILED, fix: str | None = None) -> Iterator[None]:
    """Turn whatever a task's own code raises into a TaskError; its cause is for `--verbose`.

    Args:
        task_name: `package.module:Class`.
        what: that failed, e.g. `loss()`.
        code: of the error.
        fix: what to do, if it is not the author's business.
    """
    try:
        yield
    except CollabError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a module may end the process
        if is_out_of_memory(error):  # too large a batch is not the task's fault
            raise
        raise TaskError(
            code,
            f"{what} of the task {task_name} failed: {_reason(error)}{_place(error, task_name)}.",
            fix=fix or "Tell the author of the task. With --verbose you see every step that led there.",
        ) from error


def _reason(error: BaseException) -> str:
    words = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if len(words) > MAX_REASON_CHARS:
        words = words[:MAX_REASON_CHARS] + "…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _place(error: BaseException, task_name: str) -> str:
    """The last line of the task's own package that had a part in it; the libraries below seldom tell people more."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({os.path.basename(error.filename)}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    source = _source(task_name)
    own = [frame for frame in frames if source is not None and frame.filename.startswith(source)]
    if not own:
        return ""
    return f" ({os.path.relpath(own[-1].filename, os.path.dirname(source or ''))}, line {own[-1].lineno})"


def _source(task_name: str) -> str | None:
    """The folder, or the only file, of the task's top-level package."""
    spec = find_package(task_name)
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or ()), spec.origin)


def find_package(task_name: str) -> ModuleSpec | None:
    """The top-level package that a task's name speaks of. It is found, but not run: that takes a dot in the name."""
    try:
        return importlib.util.find_spec(top_level(task_name))
    except ValueError:  # `__main__`, and what else was not imported from anywhere
        return None


def top_level(task_name: str) -> str:
    return task_name.partition(":")[0].partition(".")[0]
