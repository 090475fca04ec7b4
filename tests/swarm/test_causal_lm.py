"""Training one's own model on one's own text, with real peers and no internet."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from causal_lm import LLAMA, word_tokenizer, write_texts
from cli.test_mistakes import assert_refused
from conftest import SwarmOfProcesses
from hub_endpoint import TOKEN, serve_hub
from processes import PeerProcess, collab

pytestmark = pytest.mark.timeout(300)

RUN = """\
name = "{name}"
[task]
name = "causal-lm"
[task.options]
sequence_length = 32
{model}
{tokenizer}
[[task.options.data]]
files = ["data/*.txt"]
[strategy]
target_batch_size = 64
matchmaking_time_s = 4.0
averaging_timeout_s = 10.0
"""


def closed_port() -> str:
    """An endpoint where nobody answers: the Hub of a machine without internet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": closed_port(), "HF_HOME": str(tmp_path / "no-hub"), "HF_TOKEN": ""}


def new_run(folder: Path, *, name: str = "foxes", tokenizer: str = "") -> Path:
    """A run folder with a Llama of two layers, and text in it."""
    run = folder / name
    assert collab("new", str(run), "--template", "causal-lm").returncode == 0
    config = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in LLAMA.items())
    model = f"[task.options.model.config]\n{config}"
    (run / "run.toml").write_text(RUN.format(name=name, model=model, tokenizer=tokenizer))
    write_texts(run / "data")
    return run


def train_together(
    swarm: SwarmOfProcesses, run: Path, data: Path, env: dict[str, str], *, epochs: int = 4, **aux_env: str
) -> tuple[PeerProcess, PeerProcess, PeerProcess]:
    """An auxiliary and two trainers, for some epochs; they have the same roots, and the loss falls."""
    aux = swarm.aux(run, env={**env, **aux_env})
    first, second = (swarm.trainer(name, "--data-dir", str(data), env=env) for name in ("first", "second"))
    begun = max(peer.wait_for("epoch")["epoch"] for peer in (first, second))  # one may come when the other is ahead
    for peer in (aux, first, second):
        peer.wait_for_epoch(begun + epochs)
    seen: dict[int, str] = {}
    for peer in (aux, first, second):
        for epoch, root in peer.roots().items():
            assert seen.setdefault(epoch, root) == root, f"{peer.state_dir.name} differs at epoch {epoch}"
    # no loss of its own in an epoch whose round it only listened to
    losses = [event["loss"] for event in first.events("epoch") if event["loss"] is not None]
    assert losses[-1] < losses[0], losses
    for peer in (first, second, aux):
        assert peer.stop() == 0, peer.tail()
    return aux, first, second


def test_two_peers_train_a_llama_on_local_text_without_internet(
    swarm: SwarmOfProcesses, tmp_path: Path, offline: dict[str, str]
) -> None:
    run = new_run(tmp_path)
    _, first, second = train_together(swarm, run, run, offline)
    for peer in (first, second):
        assert not peer.events("initial_state_differs"), "a seeded model is the same on every machine"


def test_two_peers_train_from_a_folder_that_publish_model_made(
    swarm: SwarmOfProcesses, tmp_path: Path, offline: dict[str, str]
) -> None:
    run = new_run(tmp_path, name="my-model")
    published = collab("publish-model", "my-model", "--to", "./my-weights", env=offline, cwd=tmp_path)
    assert published.returncode == 0, published.stderr
    assert 'path = "../my-weights"' in (run / "run.toml").read_text()
    _, first, second = train_together(swarm, run, run, offline)
    for peer in (first, second):
        assert peer.events("initial_state_differs"), "volunteers have no weights of their own"
        assert peer.events("resynced")[0]["bytes"] > 0, "they come from peers"
        assert {file.name for file in (peer.state_dir / "assets").iterdir()} == {
            "config.json",
            "generation_config.json",
        }


def test_a_volunteer_without_the_hub_gets_config_and_tokenizer_of_a_private_model_from_peers(
    swarm: SwarmOfProcesses, tmp_path: Path, offline: dict[str, str]
) -> None:
    (tmp_path / "words.json").write_bytes(word_tokenizer())
    tokenizer = '[task.options.tokenizer]\nfile = "../words.json"\nend_of_document = "<end>"'
    run = new_run(tmp_path, tokenizer=tokenizer)
    with serve_hub() as hub:
        online = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        published = collab("publish-model", str(run), "--to", "ada/foxes", env=online)
        assert published.returncode == 0, published.stdout + published.stderr
        # from now on the tokenizer comes from the repository, too
        text = (run / "run.toml").read_text().replace(tokenizer, '[task.options.tokenizer]\nend_of_document = "<end>"')
        (run / "run.toml").write_text(text)
        (tmp_path / "words.json").unlink()
        _, first, second = train_together(swarm, run, run, offline, epochs=2, **online)
        assert any("resolve" in request and "model.safetensors" in request for request in hub.requests)
    for peer in (first, second):
        assert (peer.state_dir / "assets" / "tokenizer.json").read_bytes() == word_tokenizer()
        assert peer.events("resynced")
    assert not (tmp_path / "no-hub" / "hub").exists(), "volunteers asked the Hub for nothing"


def test_a_trainer_says_where_its_data_is_and_goes_on_in_it_after_a_kill(
    swarm: SwarmOfProcesses, tmp_path: Path, offline: dict[str, str]
) -> None:
    run = new_run(tmp_path)
    swarm.aux(run, env=offline)
    bare = collab("train", swarm.invite(), "--state-dir", str(tmp_path / "bare"), env=offline)
    assert_refused(bare, 405, "data/*.txt", "--data-dir")  # nobody's files are read because a stranger named them
    trainer = swarm.trainer("trainer", "--data-dir", str(run), "--n-workers", "2", env=offline)
    trainer.wait_for_epoch(2)
    trainer.kill()
    before = json.loads((trainer.state_dir / "data.json").read_bytes())
    num_events = len(trainer.events())
    again = swarm.trainer("trainer", "--data-dir", str(run), "--n-workers", "2", env=offline)
    again.wait_for("epoch", after=num_events)
    again.stop()
    after = json.loads((trainer.state_dir / "data.json").read_bytes())
    assert after["seed"] == before["seed"]
    assert sum(after["position"]["given"]) > sum(before["position"]["given"])
