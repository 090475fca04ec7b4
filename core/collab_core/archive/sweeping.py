"""Which encodings are needed, and getting rid of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from collab_core.archive.encoding import Kind
from collab_core.archive.index import Place
from collab_core.archive.packs import BadPack, NewItem, read_item
from collab_core.archive.store import Store
from collab_core.archive.version import Version
from collab_core.tree import TensorEntry

LIVELY = 0.5  # a pack of which less than this is needed is written anew


def sweep(store: Store, lines: Sequence[Sequence[Version]], variants: Iterable[Version], max_steps: int) -> None:
    """Delete what is stored twice or belongs to no version; every tensor of every version stays readable."""
    for pack in store.packs():
        store.index.check(pack)
    needed, _ = choose(store, lines, variants, max_steps)
    by_pack: defaultdict[str, list[Place]] = defaultdict(list)
    for place in needed.values():
        by_pack[place.pack].append(place)
    faulty = store.index.faults()
    for pack in store.index.sizes():
        if pack not in faulty:  # perhaps somebody can still make something of a damaged one; `verify` names it
            _keep_only(store, pack, by_pack[pack])


def drop_superseded(store: Store, pack: str, newest: Collection[bytes]) -> None:
    """Delete from a pack what is kept as a difference by now; the newest step stays whole."""
    if not store.index.check(pack):
        return

    def is_superseded(place: Place) -> bool:
        if place.item.kind is not Kind.RAW or place.item.tensor in newest:
            return False
        return any(all(step.pack != pack for step in way) for way in store.chains(place.item.tensor))

    _keep_only(store, pack, [place for place in store.index.places_in(pack) if not is_superseded(place)])


def _keep_only(store: Store, pack: str, live: Sequence[Place]) -> None:
    if live and sum(p.item.size for p in live) >= LIVELY * sum(p.item.size for p in store.index.places_in(pack)):
        return
    try:
        written = store.write(
            NewItem(p.item.tensor, p.item.kind, p.item.base, [read_item(store.path(pack), p.item)]) for p in live
        )
    except (BadPack, OSError):  # it is damaged, or there is no room: then it stays as it is
        return
    if all(place.pack != pack for place in written):  # the same items make the same pack
        store.drop(pack)


def choose(
    store: Store, lines: Sequence[Sequence[Version]], variants: Iterable[Version], max_steps: int
) -> tuple[dict[bytes, Place], list[TensorEntry]]:
    """One encoding for every tensor, so that no difference needs itself; and what is too far from anything whole.

    The newest step of a run is whole. Going back from it, a difference is good if what it is a difference to was chosen
    before. Variants come last: they are differences to what is there already.
    """
    places: defaultdict[bytes, list[Place]] = defaultdict(list)
    for place in store.index.all_places():
        places[place.item.tensor].append(place)
    chosen: dict[bytes, Place] = {}
    steps: dict[bytes, int] = {}

    def put(place: Place) -> None:
        chosen[place.item.tensor] = place
        steps[place.item.tensor] = 0 if place.item.base is None else steps[place.item.base] + 1

    def take(tensor: bytes, *, whole_first: bool) -> None:
        found = places[tensor]
        wholes = sorted((p for p in found if p.item.kind is not Kind.DELTA), key=lambda p: p.item.kind)
        deltas = [p for p in found if p.item.base in chosen]
        deltas.sort(key=lambda p: steps[p.item.base or b""])
        near = [p for p in deltas if steps[p.item.base or b""] < max_steps]
        best = (wholes or deltas) if whole_first else near[:1] or wholes[-1:] or deltas
        if best:
            put(best[0])
            return
        for chain in store.chains(tensor):  # its base belongs to no version any more
            for place in chain:
                if place.item.tensor not in chosen:
                    put(place)
            return

    far: list[TensorEntry] = []

    def take_all(version: Version, *, whole_first: bool) -> None:
        for entry in version.all_entries():
            tensor = entry.digest()
            if tensor not in chosen:
                take(tensor, whole_first=whole_first)
            if steps.get(tensor, 0) > max_steps:
                far.append(entry)
                steps[tensor] = 0  # as it will be when it is written whole

    for line in lines:
        for version in reversed(line):
            take_all(version, whole_first=version is line[-1])
    for version in variants:
        take_all(version, whole_first=False)
    return chosen, far
