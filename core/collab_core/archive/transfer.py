"""From one archive to another: only what is missing, and as the difference to what is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from collab_core.archive.archive import Archive
from collab_core.archive.catalogue import is_name
from collab_core.archive.encoding import Kind, encode
from collab_core.archive.mending import complete
from collab_core.archive.packs import BadPack, NewItem, read_item
from collab_core.archive.version import Version
from collab_core.tree import TensorEntry

MAX_TAGS = 8  # of a version that comes from somebody else


@dataclass(slots=True)
class Moved:
    """What a transfer did."""

    versions: int = 0
    bytes: int = 0


def transfer(source: Archive, target: Archive, versions: Iterable[Version]) -> Moved:
    """Give another archive some versions, with the signatures they have. Each is there whole, or not at all.

    What it has of them already, but damaged, is given too.
    """
    moved, wanted = Moved(), list(versions)
    known = complete(target, {version.root for version in wanted})
    for version in wanted:
        if version.root not in known:
            items = [counted(item, moved) for item in missing_items(source, target, version)]
            target.take(source.version_bytes(version.root), version.root, items)
            moved.versions += 1
    return moved


def chosen(source: Archive, references: Sequence[str] | None) -> list[Version]:
    """The versions that these references name, or all, in the order in which they should move."""
    wanted = [source.find(reference) for reference in references] if references else source.versions()
    versions = {version.root: version for version in sorted(wanted, key=lambda version: version.epoch or 0)}
    made_from = {root: version.parent for root, version in versions.items() if version.is_variant}
    return [versions[root] for root in in_order([*versions], made_from)]


def in_order(roots: Sequence[str], made_from: Mapping[str, str | None]) -> list[str]:
    """What others are differences to comes first: steps of a run, the newest first; then variants after their parents.

    Args:
        roots: oldest first.
        made_from: of every variant, the parent.
    """

    def generation(root: str) -> int:
        line: set[str] = set()
        step: str | None = root
        # somebody else may say that two were made from each other
        while step is not None and step in made_from and step not in line:
            line.add(step)
            step = made_from[step]
        return len(line)

    newest_first = roots[::-1]
    return sorted(newest_first, key=generation)


def give_tags(source: Archive, target: Archive, versions: Iterable[Version]) -> bool:
    """Names that these versions have in one archive, they have in the other then too; whether that is news."""
    there = {version.root: version for version in versions}
    news = {name: root for name, root in source.tags().items() if root in there and target.tags().get(name) != root}
    for name, root in news.items():
        target.tag(name, there[root])
    return bool(news)


def tag_from_elsewhere(archive: Archive, version: Version, names: Iterable[object]) -> None:
    """Names that somebody else gave: nobody renames what another one saved, or takes a name that means something."""
    num_taken = sum(root == version.root for root in archive.tags().values())
    for name in list(names)[: max(0, MAX_TAGS - num_taken)]:
        if not isinstance(name, str) or not is_name(name):
            continue
        taken = archive.tags().get(name)
        if taken is None or archive.signer(taken) == archive.signer(version.root):
            archive.tag(name, version)


def missing_items(source: Archive, target: Archive, version: Version) -> Iterator[NewItem]:
    """The tensors of a version that the target lacks, in the smallest form it can use."""
    for tensor, entry in {entry.digest(): entry for entry in version.all_entries()}.items():
        if not target.store.has(tensor):
            yield _item(source, target, entry)


def _item(source: Archive, target: Archive, entry: TensorEntry) -> NewItem:
    tensor = entry.digest()
    places = sorted(source.store.places(tensor), key=lambda place: place.item.size)
    for place in places:
        item = place.item
        if item.kind is Kind.RAW or (item.base is not None and not target.store.has(item.base)):
            continue
        with contextlib.suppress(BadPack):  # perhaps there is another way to it
            return NewItem(tensor, item.kind, item.base, [read_item(source.store.path(place.pack), item)])
    data = source.store.read(entry)
    return NewItem(tensor, Kind.PLANES, None, list(encode(Kind.PLANES, entry.dtype, data)))


def counted(item: NewItem, moved: Moved) -> NewItem:
    """The same item; its bytes are added to what was moved."""
    pieces = list(item.pieces)
    moved.bytes += sum(len(piece) for piece in pieces)
    return NewItem(item.tensor, item.kind, item.base, pieces)
