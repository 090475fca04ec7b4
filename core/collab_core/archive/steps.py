"""How many differences lie on the way to a tensor, and how many hang on it.

A tensor may be kept in several forms for a while. What counts is the one that `sweeping.choose` would keep: the nearest
difference, or something whole if that is too far. Differences may lead in a circle, when values come back that were
there before: then each of them has another form, too.
"""

from __future__ import annotations

from collections.abc import Collection

from collab_core.archive.encoding import Kind
from collab_core.archive.store import Store
from collab_core.archive.ways import MAX_CHAIN


def steps_to(
    store: Store,
    tensor: bytes,
    max_steps: int,
    among: Collection[bytes] | None = None,
    seen: frozenset[bytes] = frozenset(),
) -> int:
    """How many differences have to be undone to get a tensor.

    Args:
        store: where it is.
        tensor: which one.
        max_steps: a difference that is farther away than this counts only if there is nothing whole.
        among: only differences to these count; None: to anything.
        seen: what the way leads through already.
    """
    if tensor in seen or len(seen) > MAX_CHAIN:
        return MAX_CHAIN  # no way
    places = store.places(tensor)
    bases = {place.item.base for place in places if place.item.base is not None}
    near = [base for base in bases if among is None or base in among]
    steps = 1 + min((steps_to(store, base, max_steps, among, seen | {tensor}) for base in near), default=MAX_CHAIN)
    is_whole = any(place.item.kind is not Kind.DELTA for place in places)
    return 0 if is_whole and steps > max_steps else steps


def steps_from(store: Store, tensor: bytes, seen: frozenset[bytes] = frozenset()) -> int:
    """How many differences hang on this tensor, one on the other, if it becomes one itself."""
    if tensor in seen or len(seen) > MAX_CHAIN:
        return 0
    below = {place.item.tensor for place in store.index.based_on(tensor)}
    return 1 + max((steps_from(store, other, seen | {tensor}) for other in below), default=0)
