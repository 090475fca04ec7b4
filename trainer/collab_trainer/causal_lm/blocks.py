"""The blocks of a peer: a few documents each, from one source after the other as their weights say."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from blake3 import blake3

from collab_trainer.causal_lm.reading import Reader


class DocumentBlocks:
    """Blocks of documents (see `collab_trainer.task.Blocks`).

    Which source a block comes from follows from the seed and the block's number alone, so it is the same after any
    restart.

    Args:
        readers: one per source, where they were.
        weights: how much each is read, in bytes.
        seed: of this peer.
        block_bytes: about how much text a block has.
        number: of the next block.
    """

    def __init__(
        self, readers: Sequence[Reader], weights: Sequence[float], *, seed: int, block_bytes: int, number: int = 0
    ) -> None:
        self._readers, self._seed, self._block_bytes, self._number = readers, seed, block_bytes, number
        self._bounds = list(accumulate(weights))

    def __next__(self) -> list[str]:
        documents = self._readers[self._source()].read(self._block_bytes)
        self._number += 1
        return documents

    def _source(self) -> int:
        digest = blake3(f"{self._seed}/{self._number}".encode()).digest(8)
        draw = int.from_bytes(digest, "little") / 2**64 * self._bounds[-1]
        return min(bisect(self._bounds, draw), len(self._readers) - 1)

    @property
    def position(self) -> dict[str, Any]:
        return {"block": self._number, "sources": [reader.position for reader in self._readers]}


def source_positions(position: Mapping[str, Any] | None, num_sources: int) -> list[Mapping[str, Any] | None]:
    """The position of each source; None where there is none."""
    kept = list(position["sources"]) if position else []
    return kept if len(kept) == num_sources else [None] * num_sources
