"""The command `collab doctor`, and the quick part of it that every peer begins with."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from processes import collab, write_run

from collab_core.errors import Code
from collab_core.run.invite import Invite
from collab_core.run.keys import FINGERPRINT_BYTES

PEER_ID = "12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu"


def test_a_machine_without_torch_and_with_an_old_hivemind_is_told_so_and_cannot_join(tmp_path: Path) -> None:
    """Nothing here can be imported that needs torch, and the doctor still answers."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    metadata = tmp_path / "hivemind-1.0.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hivemind\nVersion: 1.0.9\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = collab("doctor", "--json", env=env)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    faults = {check["name"]: check["detail"] for check in told["checks"] if not check["ok"]}
    assert "hivemind 1.0.9 is installed, and Collab needs" in faults["packages"]
    assert "'torch', which is not installed" in faults["device"]
    assert told["can"] == {"train": False, "aux": False}
    assert "Traceback" not in done.stderr

    for role in ("train", "aux"):
        refused = collab(role, str(write_run(tmp_path, name=role)), "--state-dir", str(tmp_path / "state"), env=env)
        words = " ".join(refused.stderr.replace("│", " ").split())
        assert refused.returncode == 2, words
        assert str(Code.MACHINE_UNFIT) in words
        assert "hivemind 1.0.9 is installed" in words
        assert "pip install 'hivemind<1.2,>=1.1.12'" in words


def test_a_model_that_is_too_large_for_this_machine(tmp_path: Path) -> None:
    size = {"task__options__width": 4096, "task__options__layers": 48}
    done = collab("doctor", str(write_run(tmp_path, **size)), "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    (memory,) = (check for check in told["checks"] if check["name"] == "memory")
    assert memory["detail"].startswith("the model has 9,667.6 million parameters and takes about ")
    assert "are free" in memory["detail"]
    assert memory["fix"]
    assert told["can"] == {"train": False, "aux": False}


def test_if_nobody_is_there_the_machine_is_examined_all_the_same(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}/p2p/{PEER_ID}"
        invite = Invite(run_hash=bytes(32), fingerprint=bytes(FINGERPRINT_BYTES), initial_peers=(address,))
        done = collab("doctor", invite.encode(), "--json")
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"disk", "memory"} <= found.keys()
    assert "are free" in found["memory"]["detail"]
    assert not all(check["ok"] for check in found.values())


def test_a_run_whose_task_is_missing_and_whose_port_is_taken(tmp_path: Path) -> None:
    run = write_run(tmp_path, task__name="pictures.tasks:Pictures", task__package="pictures>=2")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = collab("doctor", str(run), "--port", str(port))
    assert done.returncode == 1, done.stderr
    words = " ".join(done.stdout.split())
    assert f"TCP port {port} is taken by another program" in words
    assert "stop it, or take a port that is free: --port " in words
    assert "no package 'pictures' is installed. (COLLAB-411)" in words
    assert "pip install 'pictures>=2'" in words
    assert "You cannot be a trainer, because of: port, task." in words
    assert "You cannot be an auxiliary, because of: port, task." in words
    assert "1. port:" in words
    assert "2. task:" in words
    assert collab("doctor", "collab1_broken").returncode == 2
