"""What an archive tells others about its versions, before they ask for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from collab_core.archive import Archive
from collab_core.archive.catalogue import EPOCH, is_name, is_start_of
from collab_core.tree import is_root

MAX_LISTED = 10_000


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions of somebody else's archive, as it says: each is believed when it is here."""

    roots: list[str] = field(default_factory=list)
    """Oldest first."""
    tags: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    """Of steps of a run."""
    made_from: dict[str, str | None] = field(default_factory=dict)
    """Of every variant, its parent."""

    @classmethod
    def parse(cls, answer: Any) -> Listing:
        """What `list_versions` has said on another machine.

        Raises:
            TypeError, AttributeError, IndexError, ValueError: it is nonsense.
        """
        roots = [root for root in answer[0][-MAX_LISTED:] if is_root(root)]
        tags = {name: root for name, root in answer[1].items() if is_root(root) and is_name(name)}
        facts = answer[2] if len(answer) > 2 else []  # peers of before say no more
        epochs: dict[str, int] = {}
        made_from: dict[str, str | None] = {}
        for root, (epoch, is_variant, parent) in zip(roots, facts, strict=bool(facts)):
            if is_variant is True:
                made_from[root] = parent if is_root(parent) else None
            elif type(epoch) is int:
                epochs[root] = epoch
        return cls(roots, tags, epochs, made_from)

    def find(self, reference: str) -> str | None:
        """The root that a tag, `latest`, `epoch:12` or the beginning of a root means; None if there is no such one."""
        if reference in self.tags:
            return self.tags[reference]
        if reference == "latest":
            return self.roots[-1] if self.roots else None
        if reference.startswith(EPOCH):
            found = [root for root, epoch in self.epochs.items() if str(epoch) == reference.removeprefix(EPOCH)]
        else:
            found = [root for root in self.roots if is_start_of(reference, root)]
        return found[0] if len(found) == 1 else None


def list_versions(archive: Archive) -> list[Any]:
    """Roots, oldest first; tags; and of every root, its epoch, whether it is a variant, and its parent."""
    versions = archive.versions()[-MAX_LISTED:]
    facts = [[version.epoch, version.is_variant, version.parent] for version in versions]
    return [[version.root for version in versions], archive.tags(), facts]
