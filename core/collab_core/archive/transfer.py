"""From one archive to another: only what is missing, and as the difference to what is there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from collab_core.archive.archive import Archive
from collab_core.archive.encoding import Kind, encode
from collab_core.archive.packs import NewItem, read_item
from collab_core.archive.version import Version
from collab_core.tree import TensorEntry


@dataclass(slots=True)
class Moved:
    """What a transfer did."""

    versions: int = 0
    bytes: int = 0


def transfer(source: Archive, target: Archive, versions: Iterable[Version]) -> Moved:
    """Give another archive some versions, with the signatures they have. Each is there whole, or not at all."""
    moved = Moved()
    known = {version.root for version in target.versions()}
    for version in versions:
        if version.root not in known:
            items = [_counted(item, moved) for item in missing_items(source, target, version)]
            target.take(source.version_bytes(version.root), version.root, items)
            moved.versions += 1
    return moved


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
        return NewItem(tensor, item.kind, item.base, [read_item(source.store.path(place.pack), item)])
    data = memoryview(source.store.read(entry))
    return NewItem(tensor, Kind.PLANES, None, list(encode(Kind.PLANES, entry.dtype, data)))


def _counted(item: NewItem, moved: Moved) -> NewItem:
    pieces = list(item.pieces)
    moved.bytes += sum(len(piece) for piece in pieces)
    return NewItem(item.tensor, item.kind, item.base, pieces)
