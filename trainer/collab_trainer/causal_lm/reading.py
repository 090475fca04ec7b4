"""A peer's own way through a source: every document once, in an order of its own, then all of them anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from collab_trainer.causal_lm.documents import LocalDocuments, take
from collab_trainer.causal_lm.shuffle import Shuffle


class Reader(Protocol):
    """Reads one source, and can go on where it was."""

    def read(self, num_chars: int) -> list[str]:
        """The next documents, about so many characters; fewer at the end of a pass, of a file or of a window."""

    @property
    def position(self) -> dict[str, Any]:
        """Where to go on after what was read; plain values."""


class LocalReader:
    """Documents on disk in shuffled order.

    A pass shows every document once; the next pass has another order. If there are more or fewer documents than the
    last time, the old order means nothing any more and a new pass begins.

    Args:
        documents: all of them.
        key: makes the order; other peers and sources have others.
        one_in: the share that is held out.
        position: where an earlier reader was.
    """

    def __init__(self, documents: LocalDocuments, *, key: str, one_in: int, position: Mapping[str, Any] | None) -> None:
        self._documents, self._key, self._one_in = documents, key, one_in
        self._pass, self._index = 0, 0
        if position is not None:
            is_same = position.get("size") == len(documents)
            self._pass = int(position["pass"]) + (not is_same)
            self._index = int(position["index"]) if is_same else 0
        self._order = self._shuffle()

    def _shuffle(self) -> Shuffle:
        return Shuffle(len(self._documents), f"{self._key}/{self._pass}")

    def read(self, num_chars: int) -> list[str]:
        if self._index == len(self._documents):
            self._pass, self._index = self._pass + 1, 0
            self._order = self._shuffle()
        rest = range(self._index, len(self._documents))
        found, num_read = take((self._documents[self._order[index]] for index in rest), num_chars, self._one_in)
        self._index += num_read
        return found

    @property
    def position(self) -> dict[str, Any]:
        return {"size": len(self._documents), "pass": self._pass, "index": self._index}
