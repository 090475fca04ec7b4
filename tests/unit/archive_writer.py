"""A bare writer for the crash test: saves one version after the other and says so, until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from collab_core.archive import Archive, Provenance
from collab_core.tree import RawTensor


def weights(epoch: int) -> dict[str, RawTensor]:
    """The model of an epoch: whoever knows the number knows the bytes."""
    rng = np.random.default_rng(0)
    arrays = {f"model/w{i}": rng.standard_normal((200, 100)).astype(np.float32) for i in range(3)}
    change = np.random.default_rng(epoch)
    for name in arrays:
        arrays[name] = arrays[name] + np.float32(1e-3) * change.standard_normal((200, 100)).astype(np.float32)
    return {name: RawTensor("float32", array.shape, memoryview(array.tobytes())) for name, array in arrays.items()}


def write(folder: Path, told: Connection) -> None:
    """Runs until it is killed."""
    archive = Archive(folder)
    archive.settle()
    epoch = max((version.epoch or 0 for version in archive.versions()), default=-1) + 1
    while True:
        archive.save(weights(epoch), Provenance(run_id="run", epoch=epoch))
        told.send(epoch)
        epoch += 1
