"""Tasks from installed packages: `task.name = "package.module:Class"`.

A run's manifest comes from somebody else, and importing a module runs it. So a manifest cannot name just any module: a
task is loaded only if an installed package registers it as the entry point of a Collab task. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from collab_core.errors import Code, ConfigError, TaskError
from collab_core.run.settings import Section, TaskSettings
from collab_trainer.blame import blaming, find_package, top_level
from collab_trainer.guarded import GuardedTask
from collab_trainer.options import read_options
from collab_trainer.task import Task, TaskOptions

ENTRY_POINT_GROUP = "collab.tasks"
MEMBERS = tuple(name for name in vars(Task) if not name.startswith("_"))

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_custom(name: str) -> bool:
    """Whether a task's name is `package.module:Class`."""
    return _NAME.fullmatch(name) is not None


def load_custom_task(settings: TaskSettings) -> Task:
    """The task of an installed package.

    Raises:
        TaskError: it is not installed, cannot be imported, or is not a task; or an option is not allowed.
        ConfigError: `task.package` makes no sense.
    """
    name = settings.name
    task_class = _load_class(settings, _registered(settings))
    options_type = getattr(task_class, "Options", TaskOptions)
    if not (isinstance(options_type, type) and issubclass(options_type, Section)):
        raise _bad(name, "its Options are not a class made of collab_trainer.TaskOptions")
    with blaming(name, "Options"):
        options = read_options(settings, options_type)
    with blaming(name, "__init__()"):
        task = task_class(seed=settings.seed, options=options)
    if missing := missing_members(task):
        raise _bad(name, f"it lacks {', '.join(missing)}")
    return GuardedTask(name, task)


def missing_members(task: object) -> list[str]:
    """Members of the protocol that an object does not have. Looks without calling: `floor` may take its time."""
    inherited = vars(Task)  # an author may derive the class from the protocol; its empty methods do not count
    return [name for name in MEMBERS if inspect.getattr_static(task, name, inherited[name]) is inherited[name]]


def _registered(settings: TaskSettings) -> EntryPoint:
    known = {"".join(point.value.split()): point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if settings.name in known:
        _check_version(settings, known[settings.name])
        return known[settings.name]
    package = top_level(settings.name)
    close = get_close_matches(settings.name, known, n=1, cutoff=0.8)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    if find_package(settings.name) is None:
        what = f"no package {package!r} is installed"
        if settings.package:
            fix = _to_install(settings)
        else:
            fix = "Ask the organiser what to install, and do it if you trust the author. Organisers: set task.package."
    else:
        what = f"{package!r} is installed and does not register it as a task"
        fix = (
            f'Authors: add `[project.entry-points."{ENTRY_POINT_GROUP}"]` with `any-name = "{settings.name}"` to '
            "pyproject.toml, and install the package again. Only what a package registers is run."
        )
    raise TaskError(Code.TASK_NOT_INSTALLED, f"The run wants the task {settings.name!r}, but {what}.", fix=guess + fix)


def _to_install(settings: TaskSettings) -> str:
    return f"If you trust its author, type `pip install {shlex.quote(settings.package)}`. Collab installs no code."


def _check_version(settings: TaskSettings, point: EntryPoint) -> None:
    """Another version may compute another loss, which nobody would notice."""
    if not settings.package or point.dist is None:
        return
    try:
        wanted = Requirement(settings.package)
    except InvalidRequirement as error:
        raise ConfigError(
            Code.BAD_VALUE,
            f"task.package = {settings.package!r} is not a package with versions: {' '.join(str(error).split())}",
            fix="Change task.package in run.toml.",
        ) from None
    if canonicalize_name(wanted.name) != canonicalize_name(point.dist.name):
        return  # a fork, say; whoever installed it knows
    if not wanted.specifier.contains(point.dist.version, prereleases=True):
        raise TaskError(
            Code.TASK_NOT_INSTALLED,
            f"The run wants {settings.package}, and version {point.dist.version} is installed here.",
            fix=_to_install(settings),
        )


def _load_class(settings: TaskSettings, point: EntryPoint) -> Any:
    module_name, _, class_name = settings.name.partition(":")
    package = point.dist.name if point.dist is not None else settings.package
    fix = f"Install what it needs, or a newer {package}; if that does not help, tell its author."
    with blaming(settings.name, f"import {module_name}", code=Code.BAD_TASK, fix=fix):
        module = importlib.import_module(module_name)
        found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    close = get_close_matches(class_name, classes, n=1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    what = f"{class_name} is not a class" if found is not None else f"{module_name} has no class {class_name!r}{guess}"
    raise _bad(settings.name, what)


def _bad(name: str, what: str) -> TaskError:
    return TaskError(
        Code.BAD_TASK,
        f"{name} cannot be used as a task: {what}.",
        fix="Authors: a task has " + ", ".join(MEMBERS) + ". Others: install another version, or tell its author.",
    )
