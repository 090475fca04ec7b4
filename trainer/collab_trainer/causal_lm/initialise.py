"""The first values of a model: the same bytes on every machine, whatever the architecture.

`torch.randn` differs between instruction sets, so matrices that transformers draws at random are drawn again here. What
transformers does not draw but computes (ones of a norm, zeros of a bias, the ladder of a state-space
model) is kept. Which is which is found out by letting it initialise twice with different seeds: what differs was drawn.

Vectors that are drawn (the time steps of a state-space model) have distributions of their own, so they are kept as
drawn, and they or what went through `exp` may differ between machines. Such a model still works: the root that a peer
builds is then not the pinned one, and it fetches the initial state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from blake3 import blake3

from collab_trainer.seeding import draw

DEFAULT_STD = 0.02
PIECE = 2**22  # values drawn at once: the raw integers take eight bytes each


def seeded(build: Callable[[], torch.nn.Module], *, seed: int, std: float) -> torch.nn.Module:
    """A model whose random values are drawn from `seed`.

    Args:
        build: makes the model; drawn from torch's global generator, whose state is left alone.
        seed: of the values.
        std: their standard deviation; they are uniform.
    """
    computed = {name: _digest(parameter) for name, parameter in _built(build, seed + 1).named_parameters()}
    model = _built(build, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and _digest(parameter) != computed[name]:
                _fill(parameter, blake3(f"{seed}/{name}".encode()).digest(16), std)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    return model


def _built(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _digest(parameter: torch.Tensor) -> bytes:
    return blake3(parameter.detach().contiguous().reshape(-1).numpy().data.cast("B")).digest()


def _fill(parameter: torch.Tensor, key: bytes, std: float) -> None:
    bits = np.random.PCG64(int.from_bytes(key, "little"))
    flat = torch.empty(parameter.numel())
    for start in range(0, len(flat), PIECE):
        piece = draw(bits, min(PIECE, len(flat) - start), std)
        flat[start : start + len(piece)] = torch.from_numpy(piece)
    parameter.copy_(flat.view(parameter.shape))
