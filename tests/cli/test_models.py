"""`collab models` as a person uses it: save, look, compare, recover, move, let go; and every mistake in words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import collab
from safetensors.numpy import load_file, save_file


def weights(change: float = 0.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    body = {f"layer{i}": rng.standard_normal((100, 50)).astype(np.float32) for i in range(4)}
    return {**body, "head": rng.standard_normal((10, 50)).astype(np.float32) + np.float32(change)}


def checkpoint(folder: Path, change: float = 0.0) -> Path:
    folder.mkdir()
    save_file(weights(change), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def models(*arguments: str, folder: Path) -> Any:
    finished = collab("models", *arguments, "--json", "--state-dir", str(folder))
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_a_fleet_of_slightly_different_models(tmp_path: Path) -> None:
    archive, server = tmp_path / "archive", tmp_path / "server"
    models("save", str(checkpoint(tmp_path / "base")), "--tag", "base", folder=archive)
    before = models("size", folder=archive)["stored_bytes"]
    saved = models(
        "save", str(checkpoint(tmp_path / "car", 0.01)), "--parent", "base", "--tag", "car-17", folder=archive
    )
    assert models("size", folder=archive)["stored_bytes"] - before < 10_000  # only the head, and what is said of it
    listed = models("log", folder=archive)["versions"]
    assert [row["ref"] for row in listed] == ["car-17", "base"]
    assert listed[0].keys() == {
        "ref", "epoch", "root", "parent", "level", "bytes", "encoding", "loss", "created", "tags",
    }  # fmt: skip
    assert (listed[0]["root"], listed[0]["parent"]) == (saved["root"], listed[1]["root"])
    difference = models("diff", "base", "car-17", folder=archive)
    assert [row["name"] for row in difference["changes"]] == ["head"]
    assert difference["transfer_bytes"] == weights()["head"].nbytes
    assert 0 < difference["relative_update"] < 0.1
    models("recover", "car-17", "-o", str(tmp_path / "back"), folder=archive)
    assert (tmp_path / "back" / "config.json").read_text() == '{"model_type": "toy"}'
    assert all((load_file(tmp_path / "back" / "model.safetensors")[k] == v).all() for k, v in weights(0.01).items())
    assert models("push", str(server), folder=archive)["versions"] == 2
    assert models("push", str(server), folder=archive)["versions"] == 0
    assert models("verify", folder=server) == {"ok": True, "checked": 2, "bad": []}
    assert models("show", "car-17", folder=server)["files"] == ["config.json"]
    models("tag", "base", "first", folder=server)
    assert models("gc", folder=server) == {"dropped": []}
    for words in (("log",), ("size",), ("show", "first"), ("diff", "base", "car-17"), ("verify",)):
        finished = collab("models", *words, "--state-dir", str(server))
        assert finished.returncode == 0, finished.stderr
        assert "Traceback" not in finished.stdout + finished.stderr


def test_costs_are_told_and_a_recorded_training_is_run_again(tmp_path: Path) -> None:
    archive, other = tmp_path / "archive", tmp_path / "other"
    models("save", str(checkpoint(tmp_path / "base")), "--tag", "base", folder=archive)
    change = "import sys; from safetensors.numpy import *; w = load_file(sys.argv[1] + '/model.safetensors'); "
    change += "w['head'] = w['head'] * 2; save_file(w, sys.argv[2] + '.safetensors')"
    words = ("record", "--parent", "base", "--tag", "doubled", "--json", "--state-dir", str(archive), "--")
    done = collab("models", *words, sys.executable, "-c", change, "{parent}", "{output}")
    assert done.returncode == 0, done.stderr
    costs = models("cost", "doubled", folder=archive)["costs"]
    assert costs.keys() == {"now", "full", "delta", "replay"}
    assert costs["replay"]["bytes"] < costs["delta"]["bytes"] < costs["full"]["bytes"]
    assert models("verify", "--replay", "doubled", folder=archive) == {"ok": True, "checked": 2, "bad": []}
    assert models("log", folder=archive)["versions"][0]["level"] == "R2"
    models("push", str(other), folder=archive)
    foreign = collab("models", "verify", "--replay", "doubled", "--state-dir", str(other))
    assert (foreign.returncode, "COLLAB-317" in foreign.stderr) == (2, True), foreign.stderr
    assert models("verify", "--replay", "doubled", "--yes", folder=other)["ok"]
    shown = collab("models", "cost", "doubled", "--state-dir", str(archive))
    assert (shown.returncode, "to recover" in shown.stdout) == (0, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("log", "--state-dir", "nowhere"), 316),
        (("log",), 316),
        (("recover", "nothing", "-o", "x", "--state-dir", "archive"), 312),
        (("recover", "base", "-o", "/proc/x", "--state-dir", "archive"), 314),
        (("save", "not-there.safetensors", "--state-dir", "archive"), 315),
        (("save", "base/config.json", "--state-dir", "archive"), 315),
        (("save", "base", "--parent", "nothing", "--state-dir", "archive"), 312),
        (("save", "base", "--data", "not-there.txt", "--state-dir", "archive"), 315),
        (("verify", "--replay", "base", "--state-dir", "archive"), 317),
        (("record", "--parent", "base", "--state-dir", "archive", "--", "false"), 318),
    ],
)
def test_mistakes_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLLAB_HOME", str(tmp_path / "home"))
    models("save", str(checkpoint(tmp_path / "base")), "--tag", "base", folder=tmp_path / "archive")
    finished = collab("models", *words)
    text = finished.stdout + finished.stderr
    assert (finished.returncode, f"COLLAB-{code}" in text, "Traceback" in text) == (2, True, False), text


def test_damage_is_named_and_nothing_wrong_is_handed_out(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    models("save", str(checkpoint(tmp_path / "base")), "--tag", "base", folder=archive)
    models("push", str(tmp_path / "backup"), folder=archive)
    (pack,) = (archive / "packs").glob("*.pack")
    content = bytearray(pack.read_bytes())
    content[1000] ^= 1
    pack.write_bytes(content)
    finished = collab("models", "verify", "--json", "--state-dir", str(archive))
    report = json.loads(finished.stdout)
    assert (finished.returncode, report["ok"], len(report["bad"])) == (1, False, 1)
    assert "COLLAB-500" not in finished.stderr, "damage is no bug in Collab"
    finished = collab("models", "recover", "base", "-o", str(tmp_path / "x"), "--state-dir", str(archive))
    assert finished.returncode == 2
    assert "COLLAB-313" in finished.stdout + finished.stderr
    assert not (tmp_path / "x" / "model.safetensors").exists()
    assert models("pull", str(tmp_path / "backup"), folder=archive)["versions"] == 1  # as the error says
    assert models("verify", folder=archive)["ok"]
    models("recover", "base", "-o", str(tmp_path / "x"), folder=archive)
