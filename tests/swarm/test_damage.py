"""A damaged replica, in memory or on disk, notices, fetches what is wrong and little else, and is equal again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from conftest import SwarmOfProcesses
from processes import PeerProcess, collab, wait_until, write_run

from collab_core.state.backup import read_backup
from collab_core.tree import CHUNK_BYTES

pytestmark = pytest.mark.timeout(240)

MAX_UPLOAD_MBIT = 0.6
FLIPPED = Path(__file__).parent / "flipped_peer.py"


def slow_run(folder: Path) -> Path:
    """Epochs long enough that the state does not move on while somebody mends its own."""
    return write_run(folder, strategy__target_batch_size=2500)


def tensors(peer: PeerProcess) -> Mapping[str, torch.Tensor]:
    backup = read_backup(peer.state_dir / "backup.collab", peer.wait_for("joined")["run_id"])
    assert backup is not None
    return backup.tensors


def chunk_bytes_at(peer: PeerProcess, places: Sequence[int]) -> int:
    """How large the chunks are that bytes of a backup lie in, counted from the first byte of its tensors."""
    chunks, start = {}, 0
    for name, tensor in sorted(tensors(peer).items()):
        for offset in range(0, tensor.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, tensor.nbytes - offset)
            if any(start + offset <= place < start + offset + size for place in places):
                chunks[name, offset] = size
        start += tensor.nbytes
    assert len(chunks) == len(places), "two of them are in one chunk"
    return sum(chunks.values())


def state_bytes(peer: PeerProcess) -> int:
    return sum(tensor.nbytes for tensor in tensors(peer).values())


def backed_up(peer: PeerProcess) -> int:
    return int(tensors(peer)["run/epoch"])


def test_flipped_bits_in_memory_cost_their_chunks_and_nobody_elses_time(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    aux = swarm.aux(slow_run(tmp_path))
    others = [aux, swarm.trainer("sound")]
    note = tmp_path / "note"
    flipped = swarm.trainer("flipped", env={"FLIP_AT": "4", "FLIP_NOTE": str(note)}, program=(str(FLIPPED),))
    mended = flipped.wait_for("resynced", lambda event: event["epoch"] >= 4)
    assert "diverged" in mended["reason"]
    assert mended["epoch"] == 4
    wrong_bytes = int(note.read_text())
    assert wrong_bytes < 0.25 * state_bytes(aux)
    # so few chunks are the last ones too, which are asked of two donors
    assert mended["bytes"] - mended["late_bytes"] <= wrong_bytes <= mended["bytes"] <= 2 * wrong_bytes
    for peer in (*others, flipped):
        peer.wait_for_epoch(7)
    healthy = {**flipped.roots(), 4: mended["root"]}
    for peer in others:
        assert all(peer.roots().get(epoch, root) == root for epoch, root in healthy.items())
        assert not peer.events("resynced")[1:]
        assert not [event for event in peer.events("round_failed") if event["epoch"] >= 4]


def test_flipped_bits_on_disk_cost_their_chunks(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    aux = swarm.aux(run)
    # it waits for its only auxiliary, so nothing moves on
    trainer = swarm.trainer("trainer", "--client-mode", "--max-upload", str(MAX_UPLOAD_MBIT))
    trainer.wait_for_epoch(3)
    path = aux.state_dir / "backup.collab"
    wait_until(lambda: path.exists() and backed_up(aux) == 3, "the auxiliary's backup of epoch 3", 30)
    aux.kill()
    data = bytearray(path.read_bytes())
    size = state_bytes(aux)
    places = [round(share * size) for share in (0.25, 0.5, 0.75)]
    wrong_bytes = chunk_bytes_at(aux, places)
    for place in places:
        data[len(data) - size + place] ^= 16
    path.write_bytes(data)
    before = len(aux.events())
    again = swarm.aux(run)
    again.wait_for("backup_damaged", after=before)
    mended = again.wait_for("resynced", after=before)
    assert (mended["epoch"], mended["bytes"]) == (3, wrong_bytes)
    assert wrong_bytes < 0.4 * size
    assert mended["bytes"] / mended["seconds"] < 1.05 * MAX_UPLOAD_MBIT * 1e6 / 8
    assert not again.events("donor_failed")
    resumed = again.wait_for("epoch", after=before)
    trainer.wait_for_epoch(resumed["epoch"])
    assert trainer.roots()[resumed["epoch"]] == resumed["root"]


def test_an_auxiliary_killed_at_any_moment_loses_no_archived_epoch(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    run = write_run(tmp_path, checkpoints__keep=1000)  # so that nothing is dropped on purpose
    aux = swarm.aux(run)
    swarm.trainer("trainer")
    rng = random.Random(0)
    archived: set[int] = set()
    for _ in range(3):
        aux.wait_for_epoch(aux.last_epoch() + 2)
        time.sleep(rng.uniform(0.0, 0.5))  # the moment is the point
        aux.kill()
        folder = str(aux.state_dir)
        listed = json.loads(collab("models", "log", "--json", "--state-dir", folder).stdout)["versions"]
        assert archived <= {row["epoch"] for row in listed}
        archived = {row["epoch"] for row in listed}
        checked = collab("models", "verify", "--json", "--state-dir", folder)
        assert checked.returncode == 0, checked.stdout
        aux = swarm.aux(run)
    assert archived
    aux.wait_for_epoch(aux.last_epoch() + 1)
    assert aux.stop() == 0
    assert not list((aux.state_dir / "archive").rglob(".*.tmp"))
