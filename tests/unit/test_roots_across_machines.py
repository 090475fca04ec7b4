"""The whole state, from the seed through updates, has the same root under every instruction set and thread count."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys, torch
from collab_core.run.settings import RunSettings
from collab_trainer import load_task, new_replica

for name in ("adamw", "lamb", "sgd"):
    settings = RunSettings.model_validate(
        {"name": "x", "optimizer": {"name": name, "decay": "cosine", "decay_epochs": 5}}
    )
    replica = new_replica(settings, load_task(settings.task).build_model())
    roots = [replica.freeze().root]
    for epoch in range(4):
        # a gradient of exact numbers: what is compared is our arithmetic, not somebody's randn
        steps = torch.arange(replica.layout.num_values, dtype=torch.int64) * 2654435761 * (epoch + 1) % 65536
        replica.update((steps.to(torch.float32) - 32768) / 65536, roots[-1])
        roots.append(replica.freeze().root)
    print(name, torch.get_num_threads(), *roots)
"""


def test_roots_agree_across_instruction_sets_and_thread_counts() -> None:
    outputs = []
    for capability, num_threads in (("default", "1"), ("avx2", "2"), ("avx512", "1"), ("default", "2")):
        environment = {
            **os.environ,
            "ATEN_CPU_CAPABILITY": capability,
            "OMP_NUM_THREADS": num_threads,
            "OMP_WAIT_POLICY": "passive",
        }
        finished = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        lines = [line.split() for line in finished.stdout.splitlines()]
        assert [line[1] for line in lines] == [num_threads] * 3
        outputs.append([(line[0], *line[2:]) for line in lines])
    assert all(output == outputs[0] for output in outputs)
    roots = {root for line in outputs[0] for root in line[1:]}
    assert len(roots) == 2 + 3 * 4  # AdamW and LAMB begin with the same state; after that all differ
