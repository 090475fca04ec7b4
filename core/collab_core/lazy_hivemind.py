"""hivemind, as much of it as is used.

`import hivemind.p2p` runs hivemind's `__init__` first, which loads its optimizers, its mixtures of experts and, to
balance loads, scipy: half a second at every start of every command. Here the package's `__init__` runs when something
asks for a name that only it has, and not before. For whoever uses hivemind besides, nothing changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "hivemind"
ASKED_FOR = ("__version__", "__all__")  # by people; other names of this kind are asked for by Python itself


class LazyPackage(ModuleType):
    """A package whose `__init__` has not run yet; its modules can be imported all the same."""

    def __getattr__(self, name: str) -> Any:
        if (module := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return module  # while it is being imported it is no attribute yet
        if (name.startswith("__") and name not in ASKED_FOR) or self.__class__ is ModuleType:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, PutOff)
        self.__spec__.loader = self.__loader__ = self.__spec__.loader.loader
        self.__loader__.exec_module(self)
        return getattr(self, name)


class PutOff(Loader):
    """Leaves it to the package when to run."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Later."""


class Finder(MetaPathFinder):
    """Finds hivemind where everyone finds it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == NAME else None
        if spec is not None and spec.loader is not None:
            spec.loader = PutOff(spec.loader)
        return spec


def put_off() -> None:
    """From now on hivemind is loaded piece by piece, unless it is there already."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
