"""A peer that lies is refused by those it talks to, with the reason in their logs; the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SwarmOfProcesses
from processes import write_run

from collab_core.state.backup import read_backup

HOSTILE = Path(__file__).parent / "hostile_peer.py"


@pytest.mark.parametrize(
    ("lie", "reason"), [("nan", "not finite"), ("weight", "weight 1e+30 is above"), ("size", "bytes instead of")]
)
def test_replicas_stay_equal_and_finite_next_to_a_liar(
    swarm: SwarmOfProcesses, tmp_path: Path, lie: str, reason: str
) -> None:
    aux = swarm.aux(write_run(tmp_path))
    honest = [swarm.trainer("first"), swarm.trainer("second")]
    liar = swarm.trainer("liar", env={"HOSTILE": lie}, program=(str(HOSTILE),))
    joined = liar.wait_for("joined")
    refused = aux.wait_for("refused", lambda event: event["peer_id"] == joined["peer_id"])
    assert reason in refused["reason"]
    epoch = aux.last_epoch() + 4
    for peer in (aux, *honest):
        peer.wait_for_epoch(epoch)
    seen: dict[int, str] = {}
    for peer in (aux, *honest):
        for number, root in peer.roots().items():
            assert seen.setdefault(number, root) == root
    aux.stop()
    backup = read_backup(aux.state_dir / "backup.collab", aux.wait_for("joined")["run_id"])
    assert backup is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in backup.tensors.values() if tensor.is_floating_point())
