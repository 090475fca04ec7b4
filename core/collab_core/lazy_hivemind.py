"""hivemind, as much of it as is used.

`import hivemind.p2p` runs hivemind's `__init__` first, which loads its optimizers, its mixtures of experts and, to
balance loads, scipy; the `__init__` of its utilities loads torch. That is three seconds at every start of every
command, also of those that need neither. Here a package of hivemind loads what it is asked for, from where its
`__init__` says that it is, and runs that only for what it does not import. For whoever uses hivemind besides, nothing
changes.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAMES = ("hivemind", "hivemind.dht", "hivemind.utils")
ASKED_FOR = ("__version__", "__all__")  # by people; other names of this kind are asked for by Python itself


class LazyPackage(ModuleType):
    """A package whose `__init__` has not run yet; what it consists of can be imported all the same."""

    def __getattr__(self, name: str) -> Any:
        if (module := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return module  # while it is being imported it is no attribute yet
        if (name.startswith("__") and name not in ASKED_FOR) or self.__class__ is ModuleType:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, PutOff)
        loader = self.__spec__.loader
        if (origin := loader.origins.get(name)) is not None:
            value = getattr(importlib.import_module(origin), name)
            setattr(self, name, value)
            return value
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader = self.__loader__ = loader.loader
        loader.loader.exec_module(self)
        return getattr(self, name)


class PutOff(Loader):
    """Leaves it to the package when to run."""

    def __init__(self, name: str, loader: InspectLoader) -> None:
        self.loader = loader
        self.origins = dict(_imports(loader.get_source(name) or ""))
        """Where the package's `__init__` has its names from."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Later."""


def _imports(source: str) -> list[tuple[str, str]]:
    lines = [line for line in ast.parse(source).body if isinstance(line, ast.ImportFrom)]
    return [(name.name, line.module) for line in lines if line.module for name in line.names if name.asname is None]


class Finder(MetaPathFinder):
    """Finds hivemind where everyone finds it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in NAMES else None
        if spec is not None and isinstance(spec.loader, InspectLoader):
            spec.loader = PutOff(fullname, spec.loader)
        return spec


def put_off() -> None:
    """From now on hivemind is loaded piece by piece, unless it is there already."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
