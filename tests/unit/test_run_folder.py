"""The organiser's folder: made whole or not at all, signed once, signed anew when the run file changes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from collab_core.errors import Code, ConfigError, StateError, SwarmError
from collab_core.run import OrganiserKey, Prepared, RunFolder, RunSettings, fingerprint, run_template, template_files
from collab_core.templates import Template

TEMPLATE = run_template("my-run")


class Root:
    """Stands for the slow preparation of a run, and counts."""

    def __init__(self, root: str = "ab" * 32, assets: dict[str, bytes] | None = None) -> None:
        self.root = root
        self.assets = assets or {}
        self.num_calls = 0

    def __call__(self, settings: RunSettings, run_dir: Path) -> Prepared:
        self.num_calls += 1
        return Prepared(self.root, self.assets)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "my-run", TEMPLATE)


def edit(folder: RunFolder, old: str, new: str) -> None:
    text = folder.run_file.read_text()
    assert old in text
    folder.run_file.write_text(text.replace(old, new))


def test_a_new_folder_is_valid_as_it_stands(folder: RunFolder) -> None:
    assert {file.name for file in folder.path.iterdir()} == {"run.toml", "organiser.key"}
    assert folder.settings().name == "my-run"
    assert folder.key().public
    assert stat.S_IMODE(folder.key_file.stat().st_mode) == 0o600


def test_an_empty_folder_may_be_used_and_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", TEMPLATE).settings().name == "my-run"
    assert RunFolder.create(tmp_path / "a" / "b", TEMPLATE).settings().name == "my-run"
    assert RunFolder.create(tmp_path / "c.toml", TEMPLATE).run_file == tmp_path / "c.toml" / "run.toml"


def test_the_join_page_gets_every_new_invite_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "my-run", TEMPLATE, template_files("my-run", Template.TINY_GPT))
    page = folder.join_file.read_text()
    assert page.startswith("# Join my-run")
    num_places = page.count("collab1_…")
    assert num_places >= 3
    folder.join_file.write_text(page + "Bring tea.\n")
    for invite in ("collab1_abc-D_9", "collab1_zzz"):
        assert folder.tell_invite(invite)
        assert folder.join_file.read_text() == page.replace("collab1_…", invite) + "Bring tea.\n"
        assert not folder.tell_invite(invite), "nothing to do"
    for live in ("http://192.0.2.1:8420/", "http://[2001:db8::1]:8421/"):
        assert folder.tell_invite(invite, live)
        assert folder.join_file.read_text().count("**Live:** <") == 1
        assert f"**Live:** <{live}>\n" in folder.join_file.read_text()
        assert not folder.tell_invite(invite, live)
    folder.join_file.write_text(folder.join_file.read_text().replace(live, "https://runs.example/"))
    assert not folder.tell_invite(invite, live), "a web server in front of it has another address"
    folder.join_file.unlink()
    assert not folder.tell_invite("collab1_abc")
    assert not folder.join_file.exists(), "who took it away does not want it"


@pytest.mark.parametrize("where", ["kaggle", "colab"])
def test_the_notebooks_of_the_join_page_get_every_new_invite_and_the_rest_of_them_stays(
    tmp_path: Path, where: str
) -> None:
    folder = RunFolder.create(tmp_path / "my-run", TEMPLATE, template_files("my-run", Template.TINY_GPT))
    path = folder.path / "web" / f"collab-{where}.ipynb"

    def code() -> list[str]:
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]

    path.write_text(path.read_text().replace("collab-train", "https://runs.example/collab.whl"))
    before = code()
    assert "runs.example" in before[0]
    for invite in ("collab1_abc-D_9", "collab1_zzz"):
        assert folder.tell_invite(invite)
        assert code() == [cell.replace('invite = ""', f'invite = "{invite}"') for cell in before]
        assert sum(invite in cell for cell in code()) == 1
        assert not folder.tell_invite(invite), "nothing to do"
    path.unlink()
    assert folder.tell_invite("collab1_abc"), "the page does without it"


def test_the_run_file_stands_for_its_folder(folder: RunFolder) -> None:
    same = RunFolder(folder.run_file)
    assert (same.path, same.run_file, same.key_file) == (folder.path, folder.run_file, folder.key_file)


def test_an_existing_run_is_never_touched(folder: RunFolder) -> None:
    before = {file.name: file.read_bytes() for file in folder.path.iterdir()}
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(folder.path, run_template("other"))
    assert caught.value.code is Code.FOLDER_EXISTS
    assert {file.name: file.read_bytes() for file in folder.path.iterdir()} == before


@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_a_name_that_is_taken_by_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "my-run"
    if kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(path, TEMPLATE)
    assert caught.value.code is Code.FOLDER_EXISTS
    assert os.path.lexists(path)


def test_a_folder_below_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StateError, match="Not a directory"):
        RunFolder.create(tmp_path / "file" / "my-run", TEMPLATE)


def test_a_half_made_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("collab_core.run.folder.create_file", full)
    with pytest.raises(StateError, match="No space left") as caught:
        RunFolder.create(tmp_path / "a" / "my-run", TEMPLATE)
    assert caught.value.code is Code.STATE_DIR_UNWRITABLE
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_is_no_run_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(ConfigError):
            RunFolder.create(path, "name = 3")
    assert [file.name for file in tmp_path.rglob("*")] == ["empty"]


def test_a_key_made_by_someone_else_in_between_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my-run"
    create = OrganiserKey.create

    def too_late(file: Path) -> OrganiserKey:
        file.write_text("theirs")
        return create(file)

    monkeypatch.setattr(OrganiserKey, "create", too_late)
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(path, TEMPLATE)
    assert caught.value.code is Code.FOLDER_EXISTS
    assert (path / "organiser.key").read_text() == "theirs"


def test_a_missing_folder_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nothing" / "run.toml"):
        with pytest.raises(ConfigError) as caught:
            RunFolder(path).signed_manifest(Root())
        assert caught.value.code is Code.RUN_NOT_FOUND
        assert str(tmp_path / "nothing" / "run.toml'") in caught.value.message


def test_a_run_is_signed_once_and_then_kept(folder: RunFolder) -> None:
    root = Root()
    signed = folder.signed_manifest(root)
    manifest = signed.open(None, fingerprint(folder.key().public))
    assert manifest.settings == folder.settings()
    assert manifest.initial_root == root.root
    assert folder.signed_manifest(root) == RunFolder(folder.run_file).signed_manifest(root) == signed
    assert root.num_calls == 1
    assert {file.name for file in folder.path.iterdir()} == {"run.toml", "organiser.key", "manifest.json"}


def test_a_comment_does_not_make_a_new_run_but_a_setting_does(folder: RunFolder) -> None:
    root = Root()
    first = folder.signed_manifest(root)
    edit(folder, "lr = 0.01", "lr = 1e-2  # the same")
    assert folder.signed_manifest(root) == first
    edit(folder, "lr = 1e-2", "lr = 0.001")
    second = folder.signed_manifest(root)
    assert second.run_hash != first.run_hash
    assert root.num_calls == 2
    assert folder.signed_manifest(root) == second


def test_an_option_that_changes_its_type_only_is_a_new_run(folder: RunFolder) -> None:
    first = folder.signed_manifest(Root())
    edit(folder, "width = 64", "width = 64.0")
    assert folder.signed_manifest(Root()).run_hash != first.run_hash


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 300_000])
def test_a_damaged_manifest_is_signed_anew(folder: RunFolder, damage: bytes) -> None:
    first = folder.signed_manifest(Root())
    folder.manifest_file.write_bytes(damage)
    root = Root()
    assert folder.signed_manifest(root) == first
    assert root.num_calls == 1


def test_a_manifest_signed_by_another_key_is_not_kept(folder: RunFolder) -> None:
    first = folder.signed_manifest(Root())
    folder.key_file.unlink()
    key = OrganiserKey.create(folder.key_file)
    second = folder.signed_manifest(Root())
    assert second.run_hash != first.run_hash
    with pytest.raises(SwarmError):
        first.open(None, fingerprint(key.public))


def test_a_copy_without_the_key_can_serve_the_signed_run(folder: RunFolder) -> None:
    signed = folder.signed_manifest(Root())
    folder.key_file.unlink()
    root = Root()
    assert folder.signed_manifest(root) == signed
    assert root.num_calls == 0


def test_a_copy_without_the_key_cannot_change_the_run(folder: RunFolder) -> None:
    folder.signed_manifest(Root())
    folder.key_file.unlink()
    edit(folder, "lr = 0.01", "lr = 0.001")
    root = Root()
    with pytest.raises(ConfigError) as caught:
        folder.signed_manifest(root)
    assert caught.value.code is Code.NO_ORGANISER_KEY
    assert "optimizer.lr: 0.001 here, 0.01 in the run" in caught.value.message
    assert "undo the change" in caught.value.fix
    assert root.num_calls == 0


@pytest.mark.parametrize("manifest", [None, b"{}"])
def test_without_key_and_manifest_the_error_says_what_to_do(folder: RunFolder, manifest: bytes | None) -> None:
    folder.key_file.unlink()
    if manifest is not None:
        folder.manifest_file.write_bytes(manifest)
    with pytest.raises(ConfigError) as caught:
        folder.signed_manifest(Root())
    assert caught.value.code is Code.NO_ORGANISER_KEY
    assert "organiser.key" in caught.value.fix
    assert "collab new" in caught.value.fix


def test_a_damaged_key_is_an_error_and_not_a_missing_one(folder: RunFolder) -> None:
    folder.signed_manifest(Root())
    folder.key_file.write_text("damaged")
    with pytest.raises(ConfigError) as caught:
        folder.signed_manifest(Root())
    assert caught.value.code is Code.NO_ORGANISER_KEY


def test_a_full_disk_keeps_the_old_manifest(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.signed_manifest(Root())
    before = folder.manifest_file.read_bytes()
    edit(folder, "lr = 0.01", "lr = 0.001")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StateError, match="No space left"):
        folder.signed_manifest(Root())
    assert folder.manifest_file.read_bytes() == before
    assert {file.name for file in folder.path.iterdir()} == {"run.toml", "organiser.key", "manifest.json"}
