"""torch tensors as bytes and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from collab_core.tree import ITEM_BYTES, RawTensor, StateTree

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def raw(tensor: torch.Tensor) -> RawTensor:
    """The bytes of a CPU tensor; without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return RawTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)


def tensor_from(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over these bytes."""
    kind = DTYPES[dtype]
    flat = torch.frombuffer(data, dtype=kind, count=math.prod(shape)) if data else torch.empty(0, dtype=kind)
    return flat.view(shape)


def tree_of(tensors: Mapping[str, torch.Tensor]) -> StateTree:
    return StateTree.of({name: raw(tensor) for name, tensor in tensors.items()})
