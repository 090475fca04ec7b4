"""Versions of a model in a repository on the Hub: only what is missing travels, all of a push is there or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_endpoint import Hub
from processes import collab
from safetensors.numpy import load_file, save_file

REPO = "ada/fleet"
WIDTH = 200


class Device:
    """A machine with an archive of its own."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self._env = folder, {**env, "HF_HOME": str(folder / "hub")}

    def models(self, command: str, *arguments: str, expected: int = 0) -> Any:
        state = ("--state-dir", str(self.folder / "archive"))
        done = collab("models", command, *arguments, *state, "--json", env=self._env)
        assert done.returncode == expected, done.stdout + done.stderr
        return json.loads(done.stdout) if expected == 0 else done.stderr

    def save(self, weights: dict[str, Any], tag: str, *options: str) -> None:
        self.folder.mkdir(exist_ok=True)
        save_file(weights, self.folder / "model.safetensors")
        self.models("save", str(self.folder / "model.safetensors"), "--tag", tag, *options)

    def recover(self, reference: str) -> dict[str, Any]:
        self.models("recover", reference, "-o", str(self.folder / "out.safetensors"))
        found: dict[str, Any] = load_file(self.folder / "out.safetensors")
        return found


@pytest.fixture
def base() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"layer.{number}": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for number in range(4)}


def changed(base: dict[str, Any], seed: int) -> dict[str, Any]:
    """As if one layer had been trained a little on a device."""
    update = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) * np.float32(1e-4)
    return {**base, "layer.3": base["layer.3"] + update}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_devices_meet_on_the_hub_and_only_what_is_missing_travels(
    hub: Hub, env: dict[str, str], tmp_path: Path, base: dict[str, Any]
) -> None:
    first, second, server = (Device(tmp_path / name, env) for name in ("first", "second", "server"))
    first.save(base, "base")
    whole = first.models("push", REPO)
    assert whole["versions"] == 1
    repo = hub.repos["models", REPO]
    assert repo.is_private
    num_commits = len(repo.commits)

    assert second.models("pull", REPO, "base")["versions"] == 1
    second.save(changed(base, 2), "car-2", "--parent", "base")
    pushed = second.models("push", REPO)
    assert pushed["versions"] == 1
    assert pushed["bytes"] < whole["bytes"] / 4  # one layer of four, as a difference
    assert len(repo.commits) == num_commits + 1
    assert second.models("push", REPO) == {"versions": 0, "bytes": 0}

    first.save(changed(base, 1), "car-1", "--parent", "base")
    first.models("push", REPO, "car-1")

    assert server.models("pull", REPO)["versions"] == 3
    assert same(server.recover("car-1"), changed(base, 1))
    assert same(server.recover("car-2"), changed(base, 2))
    assert server.models("verify")["ok"]
    damaged = max((server.folder / "archive" / "packs").iterdir(), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert server.models("pull", REPO)["versions"] > 0
    assert server.models("verify")["ok"]
    hub.requests.clear()
    assert first.models("pull", REPO)["versions"] == 1  # the other device's, of which it has all but one layer
    assert same(first.recover("car-2"), changed(base, 2))
    assert len([request for request in hub.requests if request.startswith("GET") and "/packs/" in request]) == 1


def test_a_variant_of_a_variant_arrives_where_only_the_base_is(
    hub: Hub, env: dict[str, str], tmp_path: Path, base: dict[str, Any]
) -> None:
    first, second = Device(tmp_path / "first", env), Device(tmp_path / "second", env)
    first.save(base, "base")
    first.models("push", REPO)
    second.models("pull", REPO)
    first.save(changed(base, 1), "day-1", "--parent", "base")
    first.models("push", REPO)
    first.save(changed(changed(base, 1), 2), "day-2", "--parent", "day-1")
    first.models("push", REPO)
    assert second.models("pull", REPO)["versions"] == 2
    assert same(second.recover("day-2"), changed(changed(base, 1), 2))


def test_nobody_takes_a_name_that_another_one_gave(
    hub: Hub, env: dict[str, str], tmp_path: Path, base: dict[str, Any]
) -> None:
    first, second = Device(tmp_path / "first", env), Device(tmp_path / "second", env)
    first.save(base, "prod")
    second.save(changed(base, 1), "prod")
    second.models("push", REPO)
    assert first.models("pull", REPO)["versions"] == 1
    assert same(first.recover("prod"), base)


def test_two_that_push_at_once_both_arrive(hub: Hub, env: dict[str, str], tmp_path: Path, base: dict[str, Any]) -> None:
    first, second = Device(tmp_path / "first", env), Device(tmp_path / "second", env)
    first.save(base, "base")
    second.save(changed(base, 1), "other")
    hub.add("models", REPO, {"README.md": b""}, is_private=True)

    def interfere() -> None:
        hub.before_commit = lambda: None
        second.models("push", REPO)

    hub.before_commit = interfere
    assert first.models("push", REPO)["versions"] == 1
    files = hub.repos["models", REPO].at("main")
    assert files is not None
    assert json.loads(files["tags.json"])["tags"].keys() == {"base", "other"}
    assert len([name for name in files if name.startswith("versions/")]) == 2


def test_a_push_that_breaks_leaves_nothing_and_junk_in_the_repository_is_not_taken(
    hub: Hub, env: dict[str, str], tmp_path: Path, base: dict[str, Any]
) -> None:
    device, other = Device(tmp_path / "first", env), Device(tmp_path / "second", env)
    device.save(base, "base")
    hub.refuse_commits = True
    assert "COLLAB-602" in device.models("push", REPO, expected=2)
    repo = hub.repos["models", REPO]
    assert set(repo.at("main") or {}) == {".gitattributes"}
    assert "'base'" in other.models("pull", REPO, "base", expected=2)

    hub.refuse_commits = False
    device.models("push", REPO)
    files = repo.at("main")
    assert files is not None
    pack = next(name for name in files if name.startswith("packs/"))
    damaged = bytearray(files[pack])
    damaged[len(damaged) // 2] ^= 1
    repo.commit({pack: bytes(damaged), "tables/junk": b"junk", "versions/junk.json": b"{}", "packs/junk.pack": b""})
    assert "its bytes are damaged" in other.models("pull", REPO, "base", expected=2)
    repo.commit({pack: files[pack]})
    assert other.models("pull", REPO, "base")["versions"] == 1
    assert same(other.recover("base"), base)


def test_a_repository_that_is_not_there_is_said_in_words(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    device = Device(tmp_path / "device", env)
    device.folder.mkdir()
    said = device.models("pull", "ada/nothing", expected=2)
    assert "The Hub does not have model ada/nothing" in said
    assert "Traceback" not in said
