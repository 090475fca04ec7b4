"""One question about this machine and its answer. Only the standard library: a doctor works where packages lack."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from collab_core.errors import CollabError

Role = Literal["train", "aux"]

BOTH: frozenset[Role] = frozenset({"train", "aux"})
NONE: frozenset[Role] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was looked at, and what was found."""

    name: str
    ok: bool
    detail: str
    """What was seen, with the values."""
    fix: str = ""
    """What to do or type; only if it is not ok."""
    rules_out: frozenset[Role] = NONE
    """What one cannot be as long as this is so."""


def guarded(name: str, look: Callable[[], Iterable[Check]], rules_out: frozenset[Role] = BOTH) -> Iterator[Check]:
    """Checks that cannot fail but in words: whatever is raised meanwhile becomes the last of them.

    Args:
        name: of the check that an exception becomes.
        look: gives the checks.
        rules_out: what one cannot be if Collab itself says no. What nobody foresaw rules out nothing.
    """
    try:
        yield from look()
    except CollabError as error:
        detail = f"{error.message} ({error.code})"
        yield Check(name=name, ok=False, detail=detail, fix=error.fix, rules_out=rules_out)
    except ModuleNotFoundError as error:
        detail, fix = f"it needs the package {error.name!r}, which is not installed", "See the check of the packages."
        yield Check(name=name, ok=False, detail=detail, fix=fix, rules_out=rules_out)
    except Exception as error:  # noqa: BLE001 - a doctor that faints helps nobody
        detail = f"this could not be found out ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        fix = "Try it without: join, and look whether it works. This looks like a bug in Collab; please report it."
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            fix = "See the checks of shared memory and of the disk."
        yield Check(name=name, ok=False, detail=detail, fix=fix)


def possible_roles(checks: Iterable[Check]) -> dict[Role, bool]:
    """What one can be with these answers."""
    ruled_out = frozenset[Role]().union(*(check.rules_out for check in checks if not check.ok))
    return {"train": "train" not in ruled_out, "aux": "aux" not in ruled_out}
