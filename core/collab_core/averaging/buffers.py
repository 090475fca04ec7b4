"""Memory that rounds use again and again.

The first touch of a fresh page costs more than all the arithmetic done on it later (measured: filling 100 MB takes ten
times as long in new memory as in used memory), so a round takes what an earlier round gave back.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

MAX_KEPT_BYTES = 2**28


class Buffers:
    """Free payloads and vectors by size, and a scratch space per thread."""

    def __init__(self) -> None:
        self._payloads: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._kept_bytes = 0
        self._vectors: dict[int, torch.Tensor] = {}
        self._scratch = threading.local()
        self._lock = threading.Lock()

    def payload(self, num_bytes: int) -> bytearray:
        """Bytes with whatever was in them before."""
        with self._lock:
            if free := self._payloads[num_bytes]:
                self._kept_bytes -= num_bytes
                return free.pop()
        return bytearray(num_bytes)

    def give_back(self, payload: bytearray) -> None:
        """Nobody looks at this payload any more."""
        with self._lock:
            if self._kept_bytes + len(payload) <= MAX_KEPT_BYTES:
                self._kept_bytes += len(payload)
                self._payloads[len(payload)].append(payload)

    def vector(self, num_values: int) -> torch.Tensor:
        """A vector with whatever was in it before."""
        with self._lock:
            free = self._vectors.pop(num_values, None)
        return torch.empty(num_values) if free is None else free

    def give_back_vector(self, vector: torch.Tensor) -> None:
        """Nobody looks at this vector any more."""
        with self._lock:
            self._vectors.setdefault(len(vector), vector)

    def scratch(self, name: str, num_values: int) -> torch.Tensor:
        """This thread's own space under that name, until the thread asks for it again."""
        space: torch.Tensor | None = getattr(self._scratch, name, None)
        if space is None or len(space) < num_values:
            space = torch.empty(num_values)
            setattr(self._scratch, name, space)
        return space[:num_values]
