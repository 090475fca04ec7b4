"""A state in the making: chunks are put where they belong as they come."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from collab_core.tree import CHUNK_BYTES, StateTree

if TYPE_CHECKING:
    import torch


class Assembly:
    """Memory for all tensors of a state, some of it filled."""

    def __init__(self, tree: StateTree) -> None:
        self._tree = tree
        self.sizes = tree.chunk_sizes()
        self.missing = set(self.sizes)
        self._buffers = {entry.name: bytearray(entry.num_bytes) for entry in tree.entries}
        self._places: defaultdict[bytes, list[tuple[str, int]]] = defaultdict(list)
        for entry in tree.entries:
            for number, digest in enumerate(entry.chunks):
                self._places[digest].append((entry.name, number * CHUNK_BYTES))

    def put(self, digest: bytes, chunk: bytes | memoryview) -> None:
        """A chunk that is known to be right."""
        for name, start in self._places[digest]:
            self._buffers[name][start : start + len(chunk)] = chunk
        self.missing.discard(digest)

    def get(self, digest: bytes) -> bytes | None:
        """A chunk that is there."""
        if digest in self.missing or digest not in self.sizes:
            return None
        name, start = self._places[digest][0]
        return bytes(self._buffers[name][start : start + self.sizes[digest]])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state, once nothing is missing."""
        from collab_core.state.tensors import tensor_from

        assert not self.missing
        return {
            entry.name: tensor_from(self._buffers[entry.name], entry.dtype, entry.shape) for entry in self._tree.entries
        }
