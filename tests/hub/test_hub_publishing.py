"""`collab publish-model` to a Hub that speaks the real protocol, with the real client; what fails is said in words."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from cli.test_mistakes import assert_refused
from hub_endpoint import Hub
from processes import collab
from swarm.test_causal_lm import new_run

pytestmark = pytest.mark.timeout(240)


def test_everything_goes_up_in_one_commit_and_is_pinned(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    run = new_run(tmp_path, name="my-model")
    hub.add("models", "ada/foxes", {"tokenizer.json": b"of an earlier model", "notes.txt": b"mine"}, is_private=True)
    finished = collab("publish-model", "my-model", "--to", "ada/foxes", env=env, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "collab aux" in finished.stdout
    repo = hub.repos["models", "ada/foxes"]
    assert repo.is_private, "nobody's model is public by accident"
    *_, published = repo.commits
    assert repo.commits[published].keys() == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    }, "what belongs to another model is gone, and nothing else"
    assert json.loads(repo.commits[published]["config.json"])["model_type"] == "llama"
    text = (run / "run.toml").read_text()
    assert 'repo = "ada/foxes"' in text
    assert f'revision = "{published}"' in text
    assert sum(request.startswith("POST") and "/commit/" in request for request in hub.requests) == 1
    assert any(request.startswith("PUT /lfs/") for request in hub.requests), "weights go through LFS"


def test_a_public_repository_is_made_only_when_asked_for(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    finished = collab("publish-model", str(new_run(tmp_path)), "--to", "ada/foxes", "--public", env=env)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert not hub.repos["models", "ada/foxes"].is_private


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_no_token_or_a_wrong_one(env: dict[str, str], tmp_path: Path, token: str) -> None:
    run = new_run(tmp_path)
    before = (run / "run.toml").read_bytes()
    finished = collab("publish-model", str(run), "--to", "ada/foxes", env={**env, "HF_TOKEN": token})
    assert_refused(finished, 602, "ada/foxes", "no token", "hf auth login", "HF_TOKEN")
    assert (run / "run.toml").read_bytes() == before


def test_no_right_to_the_owners_name_or_to_the_repository(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = (run / "run.toml").read_bytes()
    assert_refused(collab("publish-model", str(run), "--to", "grace/foxes", env=env), 602, "no right")
    hub.refuse_commits = True
    assert_refused(collab("publish-model", str(run), "--to", "ada/foxes", env=env), 602, "no right")
    assert (run / "run.toml").read_bytes() == before


def test_a_hub_that_is_not_there(env: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    run = new_run(tmp_path)
    finished = collab("publish-model", str(run), "--to", "ada/foxes", env={**env, "HF_ENDPOINT": closed})
    assert_refused(finished, 601, "cannot be reached", "HF_ENDPOINT")


def test_mistakes_that_need_no_hub(env: dict[str, str], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert_refused(collab("publish-model", str(run), "--to", "foxes", env=env), 108, "owner/name", "./")
    assert_refused(collab("publish-model", str(run), "--to", str(run), env=env), 108, "already exists")
    assert_refused(collab("publish-model", str(tmp_path / "none"), "--to", "./x", env=env), 101)
    assert collab("new", str(tmp_path / "tiny")).returncode == 0
    assert_refused(collab("publish-model", str(tmp_path / "tiny"), "--to", "./x", env=env), 108, "--template causal-lm")
