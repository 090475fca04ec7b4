"""A bare writer for the crash test: saves one version after the other and says so, until it is killed."""

from __future__ import annotations

import sys
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


def main() -> None:
    archive = Archive(Path(sys.argv[1]))
    archive.settle()
    epoch = max((version.epoch or 0 for version in archive.versions()), default=-1) + 1
    while True:
        archive.save(weights(epoch), Provenance(run_id="run", epoch=epoch))
        print(epoch, flush=True)
        epoch += 1


if __name__ == "__main__":
    main()
