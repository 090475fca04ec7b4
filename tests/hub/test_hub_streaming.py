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


def stream(hub: Hub, tmp_path: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each `{"source": …, "trainers": …}`."""
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps([{"token": TOKEN, "trainers": [[1, [1]]], **case} for case in cases])],
        env={**environment(), **env, "PYTHONPATH": str(SCRIPT.parent.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def assert_said(outcome: dict[str, Any], code: int, *words: str) -> None:
    assert outcome.get("code") == f"COLLAB-{code}", outcome
    assert all(word in outcome["words"] for word in words), outcome


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

    longer = hub.add(
        "datasets", "ada/bears", {f"train.{ending}": write([f"bear {n} {'growls ' * 40}" for n in range(50)])}
    )
    both = [{**source, "weight": 3.0}, {"repo": "ada/bears", "revision": longer, "weight": 1.0}]
    [report, mixed] = stream(
        hub,
        tmp_path,
        {"source": source, "trainers": [[1, [7, 1] * 16], [1, [128]], [2, [20]]]},
        {"source": both, "trainers": [[1, [80, 40]]]},
    )
    seen, undisturbed, other = report["trainers"]
    assert len(seen) > len(training), "the stream was read to its end"
    assert set(seen[: len(training)]) == training, "each once, none lost, nothing that is held out"
    assert undisturbed == seen, "a restart changes nothing"
    assert len(set(other) & set(undisturbed[: len(other)])) < len(other) / 2, "another peer begins elsewhere"
    assert report["evaluation"].strip(), "evaluation reads the same data set"
    num_chars = {
        kind: sum(len(text) for text in mixed["trainers"][0] if text.startswith(kind)) for kind in ("file", "bear")
    }
    assert num_chars["bear"] / sum(num_chars.values()) == pytest.approx(0.25, abs=0.05), "as their weights say"


def test_what_the_hub_does_not_give_is_said_in_words(hub: Hub, tmp_path: Path) -> None:
    revision = hub.add("datasets", "ada/foxes", {"train.jsonl": json_lines(["a fox"])}, is_private=True)
    source = {"repo": "ada/foxes", "revision": revision}
    outcomes = stream(
        hub,
        tmp_path,
        {"source": source, "token": ""},
        {"source": {**source, "revision": "ab" * 20}},
        {"source": {**source, "repo": "ada/wolves"}},
        {"source": {**source, "split": "test"}},
        {"source": {**source, "name": "other"}},
        {"source": {**source, "text_field": "body"}},
    )
    no_token, wrong_revision, no_such_data_set, no_such_split, no_such_name, no_such_column = outcomes
    assert_said(no_token, 602, "ada/foxes", "hf auth login")
    assert_said(wrong_revision, 603, "abababababab")
    assert_said(no_such_data_set, 603, "ada/wolves")
    assert_said(no_such_split, 405, "'test'")
    assert_said(no_such_name, 405, "other")
    assert_said(no_such_column, 405, "no column 'body'", "text")


def test_files_that_are_broken_and_a_folder_of_the_same_name_are_said_in_words(hub: Hub, tmp_path: Path) -> None:
    good = json_lines([f"a fox, number {number}" for number in range(20)])
    broken = hub.add("datasets", "ada/foxes", {"train-0.jsonl": good, "train-1.jsonl": b'{"text": "a fo'})
    sound = hub.add("datasets", "ada/wolves", {"train.jsonl": json_lines(["a wolf"])})
    (tmp_path / "ada" / "wolves").mkdir(parents=True)
    (tmp_path / "ada" / "wolves" / "secret.txt").write_text("secret")
    of_foxes, of_wolves = stream(
        hub,
        tmp_path,
        {"source": {"repo": "ada/foxes", "revision": broken}, "trainers": [[1, [40]]]},
        {"source": {"repo": "ada/wolves", "revision": sound}},
    )
    assert_said(of_foxes, 405, "ada/foxes", "cannot be read")  # and not waited for as if the Hub were away
    assert_said(of_wolves, 405, "another folder")  # never taken for the data set
