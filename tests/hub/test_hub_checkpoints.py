"""Checkpoints outlive every peer: uploaded whole or not at all, found again, checked, and what fails is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import SwarmOfProcesses
from hub_endpoint import Hub, Refusal
from processes import PeerProcess, collab, wait_until, write_run
from transformers import AutoModelForCausalLM

from collab_core.run import RunFolder
from collab_trainer import load_task

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("lab")]

REPO = "ada/checkpoints"


def checkpointed_run(folder: Path, remote: str) -> Path:
    return write_run(folder, checkpoints__remote=remote, checkpoints__upload_every=2, checkpoints__evaluate=2)


def stop(*peers: PeerProcess) -> None:
    for peer in peers:
        assert peer.stop() == 0, peer.tail()


class Logits(torch.nn.Module):
    """A model of transformers, as the built-in task asks its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        return logits


def held_out_loss(run: Path, folder: Path) -> float:
    return load_task(RunFolder(run).settings().task).evaluate(Logits(folder))


def test_a_run_that_everyone_left_goes_on_from_the_newest_sound_revision(
    swarm: SwarmOfProcesses, hub: Hub, env: dict[str, str], tmp_path: Path
) -> None:
    run = checkpointed_run(tmp_path, REPO)
    aux, trainer = swarm.aux(run, env=env), swarm.trainer("trainer", env=env)
    aux.wait_for("checkpoint", lambda event: event["epoch"] >= 4)
    report = json.loads(collab("status", swarm.invite(), "--json").stdout)
    assert report["checkpoint"]["epoch"] >= 2
    stop(trainer, aux)
    last = aux.events("checkpoint")[-1]
    repo = hub.repos["models", REPO]
    assert repo.is_private
    files = repo.commits[last["revision"]]
    assert files.keys() >= {"model.safetensors", "collab-state.safetensors", "config.json", "README.md", "collab.json"}
    assert last["root"].encode() in files["README.md"]

    # what was uploaded is what others load, and scores what was said
    recorded = json.loads(files["collab.json"])["held_out_loss"]
    published = tmp_path / "published"
    published.mkdir()
    for name in ("model.safetensors", "config.json"):
        (published / name).write_bytes(files[name])
    assert held_out_loss(run, published) == pytest.approx(recorded, rel=1e-5)
    recovered = tmp_path / "recovered"
    reference = f"epoch:{last['epoch']}"
    done = collab("models", "recover", reference, "-o", str(recovered), "--state-dir", str(aux.state_dir))
    assert done.returncode == 0, done.stderr
    shown = json.loads(collab("models", "show", reference, "--json", "--state-dir", str(aux.state_dir)).stdout)
    assert held_out_loss(run, recovered) == pytest.approx(shown["provenance"]["held_out_loss"], rel=1e-5)

    repo.commit({"model.safetensors": b"somebody's mistake"})
    elsewhere = swarm.aux(run, "elsewhere", env=env)
    found = elsewhere.wait_for("from_checkpoint")
    assert (found["epoch"], found["root"]) == (last["epoch"], last["root"])
    newcomer = swarm.start("newcomer", "train", swarm.invite("elsewhere"), "--batch-size", "8")
    assert newcomer.wait_for("joined")["root"] == last["root"]
    assert newcomer.wait_for("epoch")["epoch"] == last["epoch"] + 1


def test_a_crash_in_the_middle_of_an_upload_leaves_the_last_good_revision(
    swarm: SwarmOfProcesses, hub: Hub, env: dict[str, str], tmp_path: Path
) -> None:
    run = checkpointed_run(tmp_path, REPO)
    aux, trainer = swarm.aux(run, env=env), swarm.trainer("trainer")
    first = aux.wait_for("checkpoint")

    def crash() -> None:
        aux.kill()
        raise Refusal(500, "", "nobody is there to hear this")

    hub.before_commit = crash
    wait_until(lambda: aux.process.poll() is not None, "the next upload", 60)
    trainer.kill()
    hub.before_commit = lambda: None
    good = [event["revision"] for event in aux.events("checkpoint")]
    assert list(hub.repos["models", REPO].commits)[1:] == good
    (left_behind,) = aux.state_dir.glob("checkpoint-*")
    elsewhere = swarm.aux(run, "elsewhere", env=env)
    assert elsewhere.wait_for("from_checkpoint")["epoch"] >= first["epoch"]
    again = len(aux.events())
    restarted = swarm.aux(run, env=env)
    restarted.wait_for("joined", after=again)
    wait_until(lambda: not left_behind.exists(), "what the crash left behind is gone")


def test_missing_rights_are_said_and_the_run_goes_on(
    swarm: SwarmOfProcesses, hub: Hub, env: dict[str, str], tmp_path: Path
) -> None:
    run = checkpointed_run(tmp_path, REPO)
    aux = swarm.aux(run, env={**env, "HF_TOKEN": "hf_wrong"})
    trainer = swarm.trainer("trainer")
    failed = aux.wait_for("checkpoint_failed")
    assert "no token" in failed["reason"]
    trainer.wait_for_epoch(failed["epoch"] + 2)
    assert "Traceback" not in aux.log.read_text()


def test_a_folder_is_a_remote_too(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    remote = tmp_path / "share"
    run = checkpointed_run(tmp_path, str(remote))
    aux, trainer = swarm.aux(run), swarm.trainer("trainer")
    aux.wait_for("checkpoint", lambda event: event["epoch"] >= 10)
    stop(trainer, aux)
    last = aux.events("checkpoint")[-1]
    (home,) = remote.iterdir()
    kept = sorted(path.name for path in home.iterdir())
    assert len(kept) == 3
    (home / kept[-1] / "model.safetensors").write_bytes(b"junk")
    before = int(kept[-2].split("-")[1])
    elsewhere = swarm.aux(run, "elsewhere")
    assert elsewhere.wait_for("from_checkpoint")["epoch"] == before < last["epoch"] + 1
