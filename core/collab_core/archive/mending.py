"""What is damaged is let go of: then it is missing, and what is missing can be fetched."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from collab_core.archive.archive import Archive
from collab_core.archive.index import Place
from collab_core.archive.packs import BadPack, NewItem, begins_right, read_item
from collab_core.archive.store import Store


def complete(archive: Archive, roots: Iterable[str]) -> set[str]:
    """Those of the versions that are here whole, every byte read; what is damaged of the others is gone then."""
    wanted = set(roots)
    versions = [version for version in archive.versions() if version.root in wanted]
    if not versions:
        return set()
    with archive.writing():
        store = archive.store
        store.index.rebuild()
        tensors = {entry.digest() for version in versions for entry in version.all_entries()}
        places = _all_ways_to(store, tensors)
        for pack in {place.pack for place in places}:
            if not begins_right(store.path(pack)) or any(not _is_sound(store, p) for p in places if p.pack == pack):
                _keep_sound(store, pack)
        archive.drop_unreadable()
    return {v.root for v in versions if all(store.has(entry.digest()) for entry in v.all_entries())}


def _all_ways_to(store: Store, tensors: Collection[bytes]) -> list[Place]:
    """Every encoding of these tensors, and of what they are differences to."""
    found: list[Place] = []
    seen, todo = set(tensors), list(tensors)
    while todo:
        for place in store.places(todo.pop()):
            found.append(place)
            if place.item.base is not None and place.item.base not in seen:
                seen.add(place.item.base)
                todo.append(place.item.base)
    return found


def _is_sound(store: Store, place: Place) -> bool:
    try:
        read_item(store.path(place.pack), place.item)
    except BadPack:
        return False
    return True


def _keep_sound(store: Store, pack: str) -> None:
    sound = [place for place in store.index.places_in(pack) if _is_sound(store, place)]
    written = store.write(
        NewItem(p.item.tensor, p.item.kind, p.item.base, [read_item(store.path(pack), p.item)]) for p in sound
    )
    if all(place.pack != pack for place in written):  # the same items make the same pack
        store.drop(pack)
