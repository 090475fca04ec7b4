"""Archives of made-up trainings, for tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collab_core.archive import Archive, Provenance, Version
from collab_core.tree import RawTensor

Weights = dict[str, np.ndarray]


def raw(array: np.ndarray) -> RawTensor:
    return RawTensor(str(array.dtype), array.shape, memoryview(array.tobytes()))


def history(num_epochs: int, seed: int = 0) -> Iterator[Weights]:
    """A model whose body moves a little every epoch, with a frozen part."""
    rng = np.random.default_rng(seed)
    weights = {f"model/w{i}": rng.standard_normal((64, 40)).astype(np.float32) for i in range(3)}
    frozen = rng.standard_normal((64, 40)).astype(np.float32)
    for epoch in range(num_epochs):
        for name in weights:
            weights[name] = weights[name] + rng.standard_normal((64, 40)).astype(np.float32) * np.float32(1e-3)
        yield {**weights, "model/frozen": frozen, "run/epoch": np.array(epoch)}


def save(archive: Archive, weights: Weights, **more: object) -> Version:
    provenance = Provenance(run_id="run", epoch=int(weights["run/epoch"]))
    return archive.save({name: raw(value) for name, value in weights.items()}, provenance, **more)  # type: ignore[arg-type]


def same(archive: Archive, version: Version, weights: Weights) -> bool:
    return all(bytes(archive.store.read(entry)) == weights[entry.name].tobytes() for entry in version.entries())
