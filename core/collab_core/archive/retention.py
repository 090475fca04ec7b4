"""Which versions stay: the last ones, some older ones, and everything that has a name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from collab_core.archive.version import Version


@dataclass(frozen=True, slots=True)
class Keep:
    """How many versions of a run are kept."""

    last: int = 20
    every: tuple[int, ...] = (10, 100)

    def dropped(self, line: Sequence[Version], tagged: Collection[str]) -> list[Version]:
        """The versions of one run that may go; the newest never does."""
        last = {version.root for version in line[-max(1, self.last) :]}
        return [
            version
            for version in line
            if version.root not in last
            and version.root not in tagged
            and not any((version.epoch or 0) % step == 0 for step in self.every)
        ]
