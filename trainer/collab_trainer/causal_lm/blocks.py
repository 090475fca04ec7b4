"""The blocks of a peer: some documents each, from one source after the other as their weights say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from collab_trainer.causal_lm.reading import Reader

MAX_READS = 100  # for one block: a source may have little text between what is held out


class DocumentBlocks:
    """Blocks of documents (see `collab_trainer.task.Blocks`).

    The next block comes from the source that has given least for its weight. So what was read of them is as the weights
    say, however long their documents are and however soon a source begins anew; a restart changes nothing.

    Args:
        readers: one per source, where they were.
        weights: how much each is read, in characters.
        seed: of this peer; peers do not all begin with the same source.
        block_chars: about how much text a block has.
        given: what each source gave before, in characters.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        weights: Sequence[float],
        *,
        seed: int,
        block_chars: int,
        given: Sequence[int] = (),
    ) -> None:
        self._readers, self._weights, self._block_chars = readers, weights, block_chars
        self._given = list(given) if len(given) == len(readers) else [0] * len(readers)
        self._head_starts = [_draw(f"{seed}/{source}") * block_chars for source in range(len(readers))]

    def __next__(self) -> list[str]:
        source = min(range(len(self._readers)), key=self._progress)
        documents: list[str] = []
        missing = self._block_chars
        for _ in range(MAX_READS):
            more = self._readers[source].read(missing)
            documents += more
            missing -= sum(map(len, more))
            if missing <= 0:
                break
        # one that has nothing had its turn all the same, or the others would wait for ever
        self._given[source] += self._block_chars - missing or self._block_chars
        return documents

    def _progress(self, source: int) -> float:
        return (self._head_starts[source] + self._given[source]) / self._weights[source]

    @property
    def position(self) -> dict[str, Any]:
        return {"given": list(self._given), "sources": [reader.position for reader in self._readers]}


def source_positions(position: Mapping[str, Any] | None, num_sources: int) -> list[Mapping[str, Any] | None]:
    """The position of each source; None where there is none."""
    kept = list(position["sources"]) if position else []
    return kept if len(kept) == num_sources else [None] * num_sources


def _draw(key: str) -> float:
    return int.from_bytes(blake3(key.encode()).digest(8), "little") / 2**64
