"""Ways to a tensor: from something whole along differences, short ones first.

Usually there is one. While an archive is being settled there are more, and if something is damaged the others are
tried. A table of packs that somebody else wrote may lead anywhere, in circles too: looking for a way never takes much
longer than reading the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collab_core.archive.index import Place

MAX_CHAIN = 64  # what is read; what is written is much shorter


def ways_to(tensor: bytes, places: Callable[[bytes], list[Place]], held: bytes | None = None) -> Iterator[list[Place]]:
    """Every way to a tensor: whole forms first, then differences, those of few steps before those of many.

    Args:
        tensor: where to.
        places: every form of a tensor.
        held: a tensor that needs no form: ways may begin with a difference to it.
    """
    if tensor == held:
        yield []
    yield from ([place] for place in _wholes(places(tensor)))
    yield from _Search(tensor, places, held).differences(tensor, frozenset())


def _wholes(forms: list[Place]) -> list[Place]:
    return sorted((place for place in forms if place.item.base is None), key=lambda place: place.item.kind)


class _Search:
    """Looks at everything that a tensor may be based on, once; then goes where something whole is near."""

    def __init__(self, tensor: bytes, places: Callable[[bytes], list[Place]], held: bytes | None) -> None:
        self._held = held
        self._forms: dict[bytes, list[Place]] = {}
        todo = [tensor]
        while todo:
            current = todo.pop()
            if current not in self._forms:
                self._forms[current] = places(current)
                todo += [place.item.base for place in self._forms[current] if place.item.base is not None]
        self._steps = self._distances()
        self._dead: set[bytes] = set()
        """What cannot be reached, as far as we know: nobody looks twice."""

    def _distances(self) -> dict[bytes, int]:
        """Fewest steps to everything that can be reached."""
        based_on: dict[bytes, list[bytes]] = {}
        for tensor, forms in self._forms.items():
            for place in forms:
                if place.item.base is not None:
                    based_on.setdefault(place.item.base, []).append(tensor)
        reached = {one for one, forms in self._forms.items() if one == self._held or _wholes(forms)}
        steps: dict[bytes, int] = {}
        distance = 0
        while reached:
            steps |= dict.fromkeys(reached, distance)
            reached = {one for base in reached for one in based_on.get(base, ()) if one not in steps}
            distance += 1
        return steps

    def differences(self, tensor: bytes, seen: frozenset[bytes]) -> Iterator[list[Place]]:
        """Ways that end with a difference and lead through nothing that was seen."""
        seen = seen | {tensor}
        steps = [(place, place.item.base) for place in self._forms[tensor] if place.item.base in self._steps]
        for place, base in sorted(steps, key=lambda step: self._steps[step[1] or b""]):
            if base is None or base in seen or base in self._dead or len(seen) >= MAX_CHAIN:
                continue
            is_dead = True
            for way in self._all(base, seen):
                is_dead = False
                yield [*way, place]
            if is_dead:
                self._dead.add(base)

    def _all(self, tensor: bytes, seen: frozenset[bytes]) -> Iterator[list[Place]]:
        if tensor == self._held:
            yield []
        yield from ([place] for place in _wholes(self._forms[tensor]))
        yield from self.differences(tensor, seen)
