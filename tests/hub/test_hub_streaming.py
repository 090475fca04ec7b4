"""Data sets on the Hub: streamed by the real `datasets` library, each document once, whatever the restarts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from cli.test_mistakes import assert_refused
from hub_endpoint import TOKEN, Hub
from processes import environment

from collab_trainer.causal_lm.documents import is_held_out

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "stream_in_pieces.py"
ONE_IN = 8


def parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=40)
    return buffer.getvalue()


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def stream(hub: Hub, tmp_path: Path, source: dict[str, Any], trainers: Any, token: str = TOKEN) -> Any:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(source), json.dumps(trainers)],
        env={**environment(), **env, "PYTHONPATH": str(SCRIPT.parent.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("ending", "write"), [("parquet", parquet), ("jsonl", json_lines)])
def test_no_document_comes_twice_across_restarts_and_peers_differ(
    hub: Hub, tmp_path: Path, ending: str, write: Any
) -> None:
    files = [[f"file {file} document {number}" for number in range(100)] for file in range(3)]
    revision = hub.add(
        "datasets", "ada/foxes", {f"data/train-{n}.{ending}": write(texts) for n, texts in enumerate(files)}
    )
    source = {"repo": "ada/foxes", "revision": revision}
    everything = {text for texts in files for text in texts}
    training = {text for text in everything if not is_held_out(text, ONE_IN)}

    finished = stream(hub, tmp_path, source, [[1, [7, 1] * 16], [1, [128]], [2, [20]]])
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    seen, undisturbed, other = report["trainers"]
    assert len(seen) > len(training), "the stream was read to its end"
    assert set(seen[: len(training)]) == training, "each once, none lost, nothing that is held out"
    assert undisturbed == seen, "a restart changes nothing"
    assert len(set(other) & set(undisturbed[: len(other)])) < len(other) / 2, "another peer begins elsewhere"
    assert report["evaluation"].strip(), "evaluation reads the same data set"


@pytest.mark.parametrize(
    ("change", "token", "code", "words"),
    [
        ({}, "", 602, ["ada/foxes", "hf auth login"]),
        ({"revision": "ab" * 20}, TOKEN, 603, ["abababababab"]),
        ({"repo": "ada/wolves"}, TOKEN, 603, ["ada/wolves"]),
        ({"split": "test"}, TOKEN, 405, ["'test'"]),
        ({"name": "other"}, TOKEN, 405, ["other"]),
        ({"text_field": "body"}, TOKEN, 405, ["no column 'body'", "text"]),
    ],
    ids=["no token", "wrong revision", "no such data set", "no such split", "no such name", "no such column"],
)
def test_what_the_hub_does_not_give_is_said_in_words(
    hub: Hub, tmp_path: Path, change: dict[str, str], token: str, code: int, words: list[str]
) -> None:
    revision = hub.add("datasets", "ada/foxes", {"train.jsonl": json_lines(["a fox"])}, is_private=True)
    finished = stream(hub, tmp_path, {"repo": "ada/foxes", "revision": revision, **change}, [[1, [1]]], token=token)
    assert_refused(finished, code, *words)


def test_a_file_that_is_broken_on_the_hub_is_not_waited_for_as_if_the_hub_were_away(hub: Hub, tmp_path: Path) -> None:
    good = json_lines([f"a fox, number {number}" for number in range(20)])
    revision = hub.add("datasets", "ada/foxes", {"train-0.jsonl": good, "train-1.jsonl": b'{"text": "a fo'})
    finished = stream(hub, tmp_path, {"repo": "ada/foxes", "revision": revision}, [[1, [40]]])
    assert_refused(finished, 405, "ada/foxes", "cannot be read")


def test_a_folder_of_the_same_name_is_never_taken_for_the_data_set(hub: Hub, tmp_path: Path) -> None:
    revision = hub.add("datasets", "ada/foxes", {"train.jsonl": json_lines(["a fox"])})
    (tmp_path / "ada" / "foxes").mkdir(parents=True)
    (tmp_path / "ada" / "foxes" / "secret.txt").write_text("secret")
    finished = stream(hub, tmp_path, {"repo": "ada/foxes", "revision": revision}, [[1, [1]]])
    assert_refused(finished, 405, "another folder")
