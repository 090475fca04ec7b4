"""Identity of a state: 1 MiB chunks named by BLAKE3, tensors by their chunks, the root by names and tensors.

chunk = blake3(raw bytes); tensor = blake3("T" ‖ dtype ‖ shape ‖ chunks); root = blake3("M" ‖ sorted (name, tensor)).
Names stay outside the tensor's hash: equal tensors are equal whatever they are called. Nothing here needs torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
from blake3 import blake3

ROOT = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 2**20
MAX_TREE_BYTES = 64 * 2**20
MAX_HISTORY = 4096  # roots of earlier epochs that go with a state
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def is_root(value: object) -> bool:
    """Whether this could be the root of a state."""
    return isinstance(value, str) and ROOT.fullmatch(value) is not None


class BadTree(Exception):
    """A tree that does not lead to the root it was asked for, or makes no sense."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: what it looks like and which chunks it consists of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[bytes, ...]

    @classmethod
    def of(cls, name: str, tensor: RawTensor) -> TensorEntry:
        return cls(name, tensor.dtype, tensor.shape, tuple(blake3(c).digest() for c in split_chunks(tensor.data)))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def sized_chunks(self) -> Iterable[tuple[bytes, int]]:
        """Its chunks with their sizes: all are whole but the last one."""
        left = range(self.num_bytes, 0, -CHUNK_BYTES)
        return ((chunk, min(CHUNK_BYTES, size)) for chunk, size in zip(self.chunks, left, strict=True))

    def digest(self) -> bytes:
        header = msgpack.packb([self.dtype, list(self.shape)])
        return blake3(b"T" + header + b"".join(self.chunks)).digest()


@dataclass(frozen=True)
class StateTree:
    """Every tensor of a state, sorted by name."""

    entries: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, RawTensor]) -> StateTree:
        return cls(tuple(TensorEntry.of(name, tensors[name]) for name in sorted(tensors)))

    @cached_property
    def root(self) -> str:
        pairs = [[entry.name, entry.digest()] for entry in self.entries]
        return blake3(b"M" + msgpack.packb(pairs)).hexdigest()

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What the state looks like, whatever its values: dtype and shape by name."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}

    def chunk_sizes(self) -> dict[bytes, int]:
        """Every distinct chunk with its size."""
        sizes: dict[bytes, int] = {}
        for entry in self.entries:
            sizes.update(entry.sized_chunks())
        return sizes

    def to_bytes(self) -> bytes:
        return bytes(
            msgpack.packb([[entry.name, entry.dtype, list(entry.shape), list(entry.chunks)] for entry in self.entries])
        )

    @classmethod
    def from_bytes(cls, data: bytes, root: str) -> StateTree:
        """Read a tree from somebody else: it must lead to `root`, or it is worth nothing."""
        if len(data) > MAX_TREE_BYTES:
            raise BadTree(f"a tree of {len(data)} bytes is too large")
        try:
            tree = cls(tuple(_parse_entry(item) for item in msgpack.unpackb(data)))
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
            raise BadTree("the tree cannot be read") from error
        names = [entry.name for entry in tree.entries]
        if names != sorted(set(names)):
            raise BadTree("the tree names a tensor twice or out of order")
        sizes = {(chunk, size) for entry in tree.entries for chunk, size in entry.sized_chunks()}
        if len(sizes) != len(tree.chunk_sizes()):
            raise BadTree("the tree has one chunk in two sizes")
        if tree.root != root:
            raise BadTree(f"the tree leads to {tree.root[:12]}, not to {root[:12]}")
        return tree


def _parse_entry(item: Any) -> TensorEntry:
    name, dtype, shape, chunks = item
    entry = TensorEntry(name, dtype, tuple(shape), tuple(chunks))
    if not isinstance(name, str) or dtype not in ITEM_BYTES or any(type(n) is not int or n < 0 for n in entry.shape):
        raise ValueError("not a tensor")
    if any(type(chunk) is not bytes or len(chunk) != 32 for chunk in entry.chunks):
        raise ValueError("not a chunk")
    if len(entry.chunks) != math.ceil(entry.num_bytes / CHUNK_BYTES):
        raise ValueError("wrong number of chunks")
    return entry


def split_chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))
