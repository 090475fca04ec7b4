"""Only what the organiser's choice has signed is a checkpoint, and only bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collab_core.checkpoints.content import load_checkpoint, write_checkpoint
from collab_core.checkpoints.remotes import FolderRemote
from collab_core.checkpoints.statement import MAX_BYTES, BadCheckpoint, Statement
from collab_core.hub import is_hub_name
from collab_core.identity import Identity
from collab_core.run import Prepared, RunFolder, fingerprint, grant
from collab_core.run.manifest import Manifest
from collab_core.state.tensors import tree_of

TENSORS = {
    "model/w": torch.arange(10, dtype=torch.float32),
    "optimizer/m/w": torch.zeros(10),
    "run/epoch": torch.tensor(7),
}


class Organiser:
    """A run, and an auxiliary that its organiser signed."""

    def __init__(self, folder: Path, more: str = "") -> None:
        run = RunFolder.create(folder / "run", f'name = "run"\n{more}')
        signed = run.signed_manifest(lambda *_: Prepared("ab" * 32))
        self.manifest: Manifest = signed.open(None, fingerprint(signed.claimed_organiser))
        self.identity = Identity.load_or_create(folder / "aux.key")
        self.grant = grant(run.key(), self.manifest.run_hash, self.identity.peer_id)

    def statement(self, **changes: object) -> Statement:
        made = Statement(run_id=self.manifest.run_id, epoch=7, root=tree_of(TENSORS).root, history=[(6, "cd" * 32)])
        return made.model_copy(update=changes)

    def signed(self, **changes: object) -> Statement:
        return self.statement(**changes).signed(self.identity, self.grant)


@pytest.fixture
def organiser(tmp_path: Path) -> Organiser:
    return Organiser(tmp_path)


def written(folder: Path, statement: Statement) -> Path:
    folder.mkdir(parents=True)
    write_checkpoint(folder, TENSORS, statement, {"config.json": b"{}", "../escaped": b""}, "# A card")
    return folder


def test_a_checkpoint_comes_back_bit_for_bit(organiser: Organiser, tmp_path: Path) -> None:
    found = load_checkpoint(written(tmp_path / "made", organiser.signed()), organiser.manifest)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert dict(found.statement.history) == {6: "cd" * 32}
    assert not (tmp_path / "escaped").exists()


def test_nobody_else_makes_checkpoints(organiser: Organiser, tmp_path: Path) -> None:
    stranger = Identity.load_or_create(tmp_path / "stranger.key")
    for statement, why in (
        (organiser.statement().signed(stranger, ""), "nobody whom"),
        (organiser.statement().signed(stranger, organiser.grant), "nobody whom"),
        (organiser.signed().model_copy(update={"epoch": 8}), "signature"),
        (organiser.signed(run_id="other"), "another run"),
    ):
        with pytest.raises(BadCheckpoint, match=why):
            Statement.from_bytes(statement.to_bytes(), organiser.manifest)


def test_those_the_run_file_names_and_only_they(tmp_path: Path) -> None:
    named = Identity.load_or_create(tmp_path / "named.key")
    organiser = Organiser(tmp_path, f'[checkpoints]\ncheckpointers = ["{named.peer_id}"]\n')
    statement = organiser.statement().signed(named, "")
    assert Statement.from_bytes(statement.to_bytes(), organiser.manifest) == statement
    with pytest.raises(BadCheckpoint, match="nobody whom"):
        Statement.from_bytes(organiser.signed().to_bytes(), organiser.manifest)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b" " * (MAX_BYTES + 1)])
def test_junk_is_no_statement(organiser: Organiser, data: bytes) -> None:
    with pytest.raises(BadCheckpoint, match=r"collab\.json"):
        Statement.from_bytes(data, organiser.manifest)


@pytest.mark.parametrize("name", ["model.safetensors", "collab-state.safetensors", "collab.json"])
def test_changed_cut_off_and_missing_files_are_noticed(organiser: Organiser, tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "made", organiser.signed())
    path = folder / name
    sound = path.read_bytes()
    for damaged in (sound[:-1] + bytes([sound[-1] ^ 1]) if name != "collab.json" else sound[:-9], sound[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(BadCheckpoint):
            load_checkpoint(folder, organiser.manifest)
    path.unlink()
    with pytest.raises(BadCheckpoint):
        load_checkpoint(folder, organiser.manifest)


def test_a_folder_keeps_the_newest_and_leaves_nothing_half_made(organiser: Organiser, tmp_path: Path) -> None:
    remote = FolderRemote(tmp_path / "remote")
    assert list(remote.newest(organiser.manifest)) == []
    for epoch in (7, 8, 9, 10):
        statement = organiser.signed(epoch=epoch)
        remote.put(written(tmp_path / f"made-{epoch}", statement), statement)
    epochs = [int(folder.name.split("-")[1]) for folder in remote.newest(organiser.manifest)]
    assert epochs == [10, 9, 8]
    (home,) = (tmp_path / "remote").iterdir()
    assert not [path for path in home.iterdir() if path.name.startswith(".")]
    (home / "epoch-99999999-junk").mkdir()
    assert len(list(remote.newest(organiser.manifest))) == 3


def test_what_is_a_repository_and_what_a_folder() -> None:
    assert is_hub_name("ada/run")
    assert not any(map(is_hub_name, ("/mnt/run", "./run", "run", "a/b/c", "~/run")))
