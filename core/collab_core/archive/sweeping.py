"""Which encodings are needed, and getting rid of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from collab_core.archive.encoding import Kind
from collab_core.archive.index import Place
from collab_core.archive.packs import BadPack, NewItem, read_item
from collab_core.archive.store import Store
from collab_core.archive.version import Version

LIVELY = 0.5  # a pack of which less than this is needed is written anew


def sweep(store: Store, lines: Sequence[Sequence[Version]], variants: Iterable[Version]) -> None:
    """Delete what is stored twice or belongs to no version; every tensor of every version stays readable."""
    needed = choose(store, lines, variants)
    by_pack: defaultdict[str, list[Place]] = defaultdict(list)
    for place in needed.values():
        by_pack[place.pack].append(place)
    faulty = store.index.faults()
    for pack in store.index.sizes():
        if pack not in faulty:  # perhaps somebody can still make something of a damaged one; `verify` names it
            _keep_only(store, pack, by_pack[pack])


def drop_superseded(store: Store, pack: str, newest: Collection[bytes]) -> None:
    """Delete from a pack what is kept as a difference by now; the newest step stays whole."""

    def is_superseded(tensor: bytes) -> bool:
        return tensor not in newest and any(place.pack != pack for place in store.places(tensor))

    _keep_only(store, pack, [place for place in store.index.places_in(pack) if not is_superseded(place.item.tensor)])


def _keep_only(store: Store, pack: str, live: Sequence[Place]) -> None:
    if live and sum(place.item.size for place in live) >= LIVELY * store.index.sizes()[pack]:
        return
    try:
        store.write(
            NewItem(p.item.tensor, p.item.kind, p.item.base, [read_item(store.path(pack), p.item)]) for p in live
        )
    except (BadPack, OSError):  # it is damaged, or there is no room: then it stays as it is
        return
    store.drop(pack)


def choose(store: Store, lines: Sequence[Sequence[Version]], variants: Iterable[Version]) -> dict[bytes, Place]:
    """One encoding for every tensor, so that no difference needs itself.

    The newest step of a run is whole. Going back from it, a difference is good if what it is a difference to was chosen
    before. Variants come last: they are differences to what is there already.
    """
    places: defaultdict[bytes, list[Place]] = defaultdict(list)
    for place in store.index.all_places():
        places[place.item.tensor].append(place)
    chosen: dict[bytes, Place] = {}

    def take(tensor: bytes, *, whole_first: bool) -> None:
        if tensor in chosen:
            return
        found = places[tensor]
        wholes = sorted((p for p in found if p.item.kind is not Kind.DELTA), key=lambda p: p.item.kind)
        deltas = [p for p in found if p.item.kind is Kind.DELTA and p.item.base in chosen]
        best = (wholes or deltas)[:1] if whole_first else deltas[:1] or wholes[-1:]
        if best:
            chosen[tensor] = best[0]
            return
        for chain in store.chains(tensor):  # its base belongs to no version any more
            for place in chain:
                chosen.setdefault(place.item.tensor, place)
            return

    for line in lines:
        for version in reversed(line):
            for entry in version.all_entries():
                take(entry.digest(), whole_first=version is line[-1])
    for version in variants:
        for entry in version.all_entries():
            take(entry.digest(), whole_first=False)
    return chosen
