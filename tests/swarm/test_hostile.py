"""A peer that lies is refused by those it talks to, with the reason in their logs; the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import SwarmOfProcesses
from processes import write_run

from collab_core.state.backup import read_backup

HOSTILE = Path(__file__).parent / "hostile_peer.py"


LIES = {"nan": "not finite", "weight": "weight 1e+30 is above", "size": "bytes instead of", "norm": "exceeds the norm"}


@pytest.mark.timeout(240)
def test_replicas_stay_equal_and_finite_next_to_liars(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    aux = swarm.aux(write_run(tmp_path, limits__quarantine_epochs=4))
    honest = [swarm.trainer("first"), swarm.trainer("second")]
    liars = []
    for lie, reason in LIES.items():
        liar = swarm.trainer(lie, "--name", lie, env={"HOSTILE": lie}, program=(str(HOSTILE),))
        peer_id = liar.wait_for("joined")["peer_id"]
        liars.append(peer_id)
        for peer in (aux, *honest):  # everyone knows it and why, whoever caught it
            named = peer.wait_for("quarantined", lambda event, peer_id=peer_id: event["peer_id"] == peer_id)
            assert reason in named["reason"]
        if lie != "norm":
            liar.kill()
    out = liar.wait_for("kept_out")
    assert "exceeds the norm" in out["reason"]
    back = aux.wait_for("epoch", lambda event: "norm" in event["members"] and event["epoch"] > out["until_epoch"])
    liar.wait_for_epoch(back["epoch"])
    meanwhile = [event for event in aux.events("epoch") if out["epoch"] + 1 < event["epoch"] <= out["until_epoch"]]
    assert meanwhile
    assert not any("norm" in event["members"] for event in meanwhile)
    epoch = aux.last_epoch() + 4
    for peer in (aux, *honest):
        peer.wait_for_epoch(epoch)
    seen: dict[int, str] = {}
    for peer in (aux, *honest):
        for number, root in peer.roots().items():
            assert seen.setdefault(number, root) == root
        assert {event["peer_id"] for event in peer.events("quarantined")} == set(liars), "nobody else is ever kept out"
        assert not peer.events("kept_out")
    aux.stop()
    backup = read_backup(aux.state_dir / "backup.collab", aux.wait_for("joined")["run_id"])
    assert backup is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in backup.tensors.values() if tensor.is_floating_point())
