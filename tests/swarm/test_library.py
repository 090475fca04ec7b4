"""Archives of different machines: a device gives its model to the server it may, and gets any version back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SwarmOfProcesses
from processes import collab, write_run
from safetensors.numpy import load_file, save_file
from unit.archives import same, save

from collab_core.archive import Archive
from collab_core.identity import Identity
from collab_core.library import Library, Visitor
from swarm.in_process import ToySwarm

pytestmark = pytest.mark.timeout(240)


def models(*arguments: str, folder: Path, code: int = 0) -> Any:
    finished = collab("models", *arguments, "--json", "--state-dir", str(folder))
    assert finished.returncode == code, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    return json.loads(finished.stdout) if code == 0 else finished.stderr


def test_a_fleets_models_are_known_to_the_server_and_come_back(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    device, stranger, other = tmp_path / "device", tmp_path / "stranger", tmp_path / "other"
    rng = np.random.default_rng(0)
    body = rng.standard_normal((800, 1000)).astype(np.float32)  # more than a piece
    head = rng.standard_normal((10, 1000)).astype(np.float32)
    empty = np.zeros((0, 1000), dtype=np.float32)  # as some models have
    tuned = [body * (1 + 1e-4 * rng.standard_normal(body.shape)).astype(np.float32) for _ in range(2)]
    save_file({"body": body, "head": head, "empty": empty}, tmp_path / "base.safetensors")
    models("save", str(tmp_path / "base.safetensors"), "--tag", "base", folder=device)
    models("save", str(tmp_path / "base.safetensors"), "--tag", "evil", folder=stranger)
    for name, parent, weights in (("car-17", "base", tuned[0]), ("car-17b", "car-17", tuned[1])):
        save_file({"body": weights, "head": head * 2, "empty": empty}, tmp_path / f"{name}.safetensors")
        options = ("--parent", parent, "--tag", name, "--prefer", "storage")  # how slow a core is does not matter
        models("save", str(tmp_path / f"{name}.safetensors"), *options, folder=device)
    device_id = Identity.load_or_create(device / "identity.key").peer_id

    aux = swarm.aux(write_run(tmp_path), "aux", "--accept-models", device_id)
    refused = models("push", swarm.invite(), folder=stranger, code=2)
    assert "COLLAB-319" in refused
    first = models("push", swarm.invite(), "base", folder=device)
    assert (first["versions"], first["bytes"] > body.nbytes / 2) == (1, True)
    second = models("push", swarm.invite(), folder=device)
    # only what the server lacks, each after what it is a difference to; a whole one would take 0.85 of it
    assert (second["versions"], second["bytes"] < 1.1 * body.nbytes) == (2, True)
    pulled = models("pull", swarm.invite(), folder=other)
    assert pulled["versions"] in (3, 4)  # with the run's first state, if that is there already
    assert pulled["bytes"] < first["bytes"] + 1.1 * body.nbytes
    models("recover", "car-17b", "-o", str(tmp_path / "back.safetensors"), folder=other)
    back = load_file(tmp_path / "back.safetensors")
    assert (back["body"] == tuned[1]).all()
    assert back["empty"].shape == empty.shape
    damaged = max((other / "packs").iterdir(), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert "COLLAB-313" in models("recover", "car-17b", "-o", str(tmp_path / "none.safetensors"), folder=other, code=2)
    assert models("pull", swarm.invite(), folder=other)["bytes"] <= pulled["bytes"]
    models("recover", "car-17b", "-o", str(tmp_path / "back.safetensors"), folder=other)
    assert "COLLAB-312" in models("pull", swarm.invite(), "nothing", folder=other, code=2)

    trainer = swarm.trainer("trainer")
    trainer.wait_for_epoch(2)
    third = tmp_path / "third"  # the run's own epochs, too
    assert models("pull", swarm.invite(), "latest", "epoch:0", folder=third)["versions"] == 2
    assert models("show", "epoch:0", folder=third)["provenance"]["epoch"] == 0
    assert models("show", "latest", folder=third)["root"] in aux.roots().values()
    assert aux.stop() == 0
    listed = models("log", folder=aux.state_dir)["versions"]
    assert {"base", "car-17", "car-17b"} <= {tag for row in listed for tag in row["tags"]}
    assert models("verify", folder=aux.state_dir)["ok"]
    assert models("verify", folder=other)["ok"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[ToySwarm]:
    swarm = ToySwarm(tmp_path / "swarm", num_values=1)
    try:
        swarm.add("aux")
        swarm.add()
        swarm.meet()
        yield swarm
    finally:
        swarm.close()


def test_a_step_is_pulled_while_the_archive_turns_it_into_a_difference(
    two: ToySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = Archive(tmp_path / "theirs"), Archive(tmp_path / "ours")
    giver, taker = (peer.swarm for peer in two.peers)
    rng = np.random.default_rng(0)
    first = {f"model/{i}": rng.standard_normal((700, 1000)).astype(np.float32) for i in range(2)}
    second = {name: weights * np.float32(1.001) for name, weights in first.items()}

    root = save(theirs, {**first, "run/epoch": np.array(0)}).root
    served = Library(giver, tmp_path / "theirs")._opened()
    path_of = served.store.path

    def path(pack: str) -> Path:
        if len(theirs.versions()) == 1:  # the pack goes after it was found and before it is opened
            save(theirs, {**second, "run/epoch": np.array(1)})
            assert not path_of(pack).exists()
        return path_of(pack)

    monkeypatch.setattr(served.store, "path", path)
    assert Visitor(taker, is_trusted=lambda peer_id: True).pull(giver.peer_id, ours, [root]).versions == 1
    assert len(theirs.versions()) == 2
    assert same(ours, ours.find(root), {**first, "run/epoch": np.array(0)})
