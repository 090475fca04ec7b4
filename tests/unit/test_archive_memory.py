"""A model need not fit into memory to be recovered: about one tensor of it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collab_core.archive import Archive, Provenance
from collab_core.tree import RawTensor

NUM_TENSORS, TENSOR_BYTES = 32, 2**22
RECOVER = """
import sys
from pathlib import Path
from collab_core.archive import Archive, recover

def peak():  # not getrusage: what it says, a child inherits from whoever started it
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

archive = Archive(Path(sys.argv[1]))
version = archive.find(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
before = peak()
recover(archive, version, Path(sys.argv[3]))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    made = Archive(folder)
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(TENSOR_BYTES // 4).astype(np.float32) for _ in range(NUM_TENSORS)]
    for epoch in range(3):
        weights = [values + np.float32(1e-3 * epoch) for values in weights]
        tensors = {f"model/{i}": RawTensor("float32", w.shape, w.data.cast("B")) for i, w in enumerate(weights)}
        made.save(tensors, Provenance(run_id="run", epoch=epoch))
    made.close()
    return folder


@pytest.mark.parametrize("reference", ["epoch:0", "latest"])
def test_recovering_takes_memory_for_few_tensors(archive: Path, tmp_path: Path, reference: str) -> None:
    target = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", RECOVER, str(archive), reference, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert target.stat().st_size > NUM_TENSORS * TENSOR_BYTES
    num_bytes = int(done.stdout)
    assert TENSOR_BYTES <= num_bytes < NUM_TENSORS * TENSOR_BYTES / 4  # it was measured, and it is little
