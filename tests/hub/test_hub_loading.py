"""A model from the Hub: whoever signs the run downloads it; what fails is said in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from causal_lm import LLAMA, task, word_tokenizer, write_texts
from cli.test_mistakes import assert_refused
from hub_endpoint import Hub
from processes import collab

from collab_core.run.settings import RunSettings
from collab_trainer.causal_lm.publish import publish_to_folder

pytestmark = pytest.mark.timeout(240)

RUN = """\
name = "foxes"
[task]
name = "causal-lm"
[task.options]
sequence_length = 32
[task.options.model]
repo = "ada/foxes"
revision = "{revision}"
[[task.options.data]]
files = ["*.txt"]
"""


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    publish_to_folder(task(), RunSettings(name="foxes"), folder / "model", folder)
    return {file.name: file.read_bytes() for file in (folder / "model").iterdir()}


def run_from(folder: Path, revision: str) -> Path:
    run = folder / "foxes"
    assert collab("new", str(run)).returncode == 0
    (run / "run.toml").write_text(RUN.format(revision=revision))
    write_texts(run)
    return run


def sign(run: Path, env: dict[str, str], tmp_path: Path) -> object:
    """`collab aux` signs first; that is where the model is fetched. A bad port ends it right after."""
    options = ("--state-dir", str(tmp_path / "state"), "--host-maddrs", "/ip4/192.0.2.77/tcp/0")
    return collab("aux", str(run), *options, env=env, timeout_s=120)


def test_a_private_model_is_downloaded_once_by_whoever_signs(
    hub: Hub, env: dict[str, str], tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    revision = hub.add("models", "ada/foxes", model_files, is_private=True)
    run = run_from(tmp_path, revision)
    assert_refused(sign(run, env, tmp_path), 203)  # signed; then the bad address
    assert json.loads((run / "assets" / "config.json").read_bytes())["model_type"] == LLAMA["model_type"]
    signed = json.loads(json.loads((run / "manifest.json").read_bytes())["manifest"])
    assert signed["assets"].keys() == {"config.json", "generation_config.json"}
    num_requests = len(hub.requests)
    assert_refused(sign(run, env, tmp_path), 203)
    assert len(hub.requests) == num_requests, "a signed run is not fetched again"


def test_a_tokenizer_has_a_repository_of_its_own(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    revision = hub.add("models", "ada/words", {"tokenizer.json": word_tokenizer()}, is_private=True)
    run = run_from(tmp_path, "ab" * 20)
    model = "".join(f"{key} = {json.dumps(value)}\n" for key, value in LLAMA.items())
    tokenizer = f'[task.options.tokenizer]\nrepo = "ada/words"\nrevision = "{revision}"\nend_of_document = "<end>"\n'
    head, _, data = RUN.partition("[task.options.model]")
    rest = data.partition("[[task.options.data]]")[2]
    text = f"{head}[task.options.model.config]\n{model}{tokenizer}[[task.options.data]]{rest}"
    (run / "run.toml").write_text(text.replace(revision, "cd" * 20))
    assert_refused(sign(run, env, tmp_path), 603, "ada/words")
    (run / "run.toml").write_text(text)
    assert_refused(sign(run, env, tmp_path), 203)  # signed; then the bad address
    assert (run / "assets" / "tokenizer.json").read_bytes() == word_tokenizer()


def test_a_private_model_without_a_token(
    hub: Hub, env: dict[str, str], tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    revision = hub.add("models", "ada/foxes", model_files, is_private=True)
    run = run_from(tmp_path, revision)
    assert_refused(sign(run, {**env, "HF_TOKEN": ""}, tmp_path), 602, "ada/foxes", "no token", "hf auth login")
    assert not (run / "manifest.json").exists()


def test_a_wrong_revision_and_a_repository_that_is_not_there(
    hub: Hub, env: dict[str, str], tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    hub.add("models", "ada/foxes", model_files)
    run = run_from(tmp_path, "ab" * 20)
    assert_refused(sign(run, env, tmp_path), 603, "abababababab", "Correct the revision")
    (run / "run.toml").write_text((run / "run.toml").read_text().replace("ada/foxes", "ada/wolves"))
    assert_refused(sign(run, env, tmp_path), 603, "ada/wolves")


def test_a_download_that_breaks_off(
    hub: Hub, env: dict[str, str], tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    revision = hub.add("models", "ada/foxes", model_files)
    run = run_from(tmp_path, revision)
    hub.cut_off = {"model.safetensors"}
    assert_refused(sign(run, env, tmp_path), 604, "ada/foxes", "Try again")
    assert not (run / "manifest.json").exists()
    hub.cut_off = set()
    assert_refused(sign(run, env, tmp_path), 203)  # the second try is whole
    assert (run / "manifest.json").exists()


def test_a_repository_without_the_files_of_a_model(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    run = run_from(tmp_path, hub.add("models", "ada/foxes", {"README.md": b"nothing"}))
    assert_refused(sign(run, env, tmp_path), 603, "config.json")


def test_a_hub_that_is_not_there(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    run = run_from(tmp_path, "ab" * 20)
    assert_refused(sign(run, {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path), 601, "cannot be reached")
    assert_refused(sign(run, {**env, "HF_HUB_OFFLINE": "1"}, tmp_path), 601, "HF_HUB_OFFLINE")
