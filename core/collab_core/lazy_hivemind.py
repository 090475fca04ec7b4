"""hivemind, as much of it as is used.

`import hivemind.p2p` runs hivemind's `__init__` first, which loads its optimizers, its mixtures of experts and, to
balance loads, scipy: half a second at every start of every command. Here the package's `__init__` runs when something
asks for a name that only it has, and not before. For whoever uses hivemind besides, nothing changes.
"""

from __future__ import annotations

import importlib.util
import sys
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
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def put_off() -> None:
    """From now on hivemind is loaded piece by piece, unless it is there already."""
    if NAME in sys.modules or (spec := importlib.util.find_spec(NAME)) is None:
        return
    package = LazyPackage(NAME)
    package.__spec__, package.__loader__, package.__file__ = spec, spec.loader, spec.origin
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__package__ = NAME
    sys.modules[NAME] = package
