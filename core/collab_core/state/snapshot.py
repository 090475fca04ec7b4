"""A frozen state that others can fetch from while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collab_core.state.tree import StateTree, split_chunks, tensor_bytes


class Snapshot:
    """Copies of all tensors of a state, hashed; any chunk can be served from it."""

    def __init__(self, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.epoch = epoch
        self.tensors = dict(tensors)
        self.tree = StateTree.of(self.tensors)
        self._chunks: dict[bytes, memoryview] = {}
        for entry in self.tree.entries:
            pieces = split_chunks(tensor_bytes(self.tensors[entry.name]))
            self._chunks.update(zip(entry.chunks, pieces, strict=True))

    @property
    def root(self) -> str:
        return self.tree.root

    def chunk(self, digest: bytes) -> memoryview | None:
        return self._chunks.get(digest)
