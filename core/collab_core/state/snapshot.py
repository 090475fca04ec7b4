"""A frozen state that others can fetch from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collab_core.state.tensors import raw
from collab_core.tree import StateTree, split_chunks


class Snapshot:
    """Copies of all tensors of a state, hashed; any chunk can be served from it."""

    def __init__(self, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.epoch = epoch
        self.tensors = dict(tensors)
        bytes_of = {name: raw(tensor) for name, tensor in self.tensors.items()}
        self.tree = StateTree.of(bytes_of)
        self._chunks: dict[bytes, memoryview] = {}
        for entry in self.tree.entries:
            pieces = split_chunks(bytes_of[entry.name].data)
            self._chunks.update(zip(entry.chunks, pieces, strict=True))

    @property
    def root(self) -> str:
        return self.tree.root

    def chunk(self, digest: bytes) -> memoryview | None:
        return self._chunks.get(digest)
