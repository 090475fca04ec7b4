"""The run's files: named by hash in the manifest, capped, checked wherever they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collab_core.errors import Code, ConfigError, StateError, SwarmError
from collab_core.run import Asset, AssetFolder, Manifest, RunFolder, SignedManifest, run_template
from collab_core.run import fingerprint as mark
from collab_core.run.assets import MAX_ASSET_BYTES, MAX_ASSETS, MAX_ASSETS_BYTES, check_assets, describe_assets
from collab_core.run.folder import Prepared
from collab_core.run.manifest import difference
from collab_core.run.settings import RunSettings

FILES = {"config.json": b"{}", "tokenizer.json": b"words"}
HASH = "ab" * 32


class Preparation:
    """Counts how often a run is prepared."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.num_calls = files, 0

    def __call__(self, settings: RunSettings, run_dir: Path) -> Prepared:
        self.num_calls += 1
        return Prepared("cd" * 32, self.files)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "my-run", run_template("my-run"))


def manifest_of(folder: RunFolder, signed: SignedManifest) -> Manifest:
    return signed.open(signed.run_hash, mark(folder.key().public))


def test_the_manifest_names_each_file_by_hash_and_size(folder: RunFolder) -> None:
    manifest = manifest_of(folder, folder.signed_manifest(Preparation(FILES)))
    assert manifest.assets == {name: Asset.of(data) for name, data in FILES.items()}
    assert json.loads(manifest.canonical())["assets"]["config.json"] == {"hash": Asset.of(b"{}").hash, "size": 2}
    assert folder.assets.read(manifest.assets) == FILES


def test_another_file_is_another_run_and_the_difference_is_told(folder: RunFolder) -> None:
    one = manifest_of(folder, folder.signed_manifest(Preparation(FILES)))
    folder.manifest_file.unlink()
    two = manifest_of(folder, folder.signed_manifest(Preparation({**FILES, "config.json": b"[]"})))
    assert one.run_hash != two.run_hash
    (line,) = difference(one, two)
    assert line.startswith('assets."config.json": ')


@pytest.mark.parametrize(
    "assets",
    [
        {"config.json": {"hash": HASH, "size": -1}},
        {"config.json": {"hash": HASH, "size": True}},
        {"config.json": {"hash": HASH, "size": MAX_ASSET_BYTES + 1}},
        {"config.json": {"hash": HASH.upper(), "size": 1}},
        {"config.json": {"hash": HASH, "size": 1, "mode": 7}},
        {"config.json": HASH},
        {"../config.json": {"hash": HASH, "size": 1}},
        {"a/b": {"hash": HASH, "size": 1}},
        {".hidden": {"hash": HASH, "size": 1}},
        {"config.json\n": {"hash": HASH, "size": 1}},
        {"": {"hash": HASH, "size": 1}},
        {"A.json": {"hash": HASH, "size": 1}, "a.json": {"hash": HASH, "size": 1}},
        {f"file{number}": {"hash": HASH, "size": 1} for number in range(MAX_ASSETS + 1)},
        {f"file{number}": {"hash": HASH, "size": MAX_ASSET_BYTES} for number in range(3)},
        [],
        {},  # a run without files does not mention them: one content, one form
    ],
    ids=str,
)
def test_a_signed_manifest_with_files_nobody_should_take_is_refused(folder: RunFolder, assets: object) -> None:
    key = folder.key()
    fields = json.loads(folder.signed_manifest(Preparation({})).document)
    document = json.dumps({**fields, "assets": assets}, sort_keys=True, separators=(",", ":")).encode()
    signed = SignedManifest(document, key.sign(b"collab manifest v1\0" + document))
    with pytest.raises(SwarmError) as caught:
        signed.open(None, mark(key.public))
    assert caught.value.code is Code.WRONG_MANIFEST


def test_files_that_peers_would_refuse_are_refused_before_signing() -> None:
    for files in ({"big.json": bytes(MAX_ASSET_BYTES + 1)}, {"../x": b""}):
        with pytest.raises(ConfigError) as caught:
            describe_assets(files)
        assert caught.value.code is Code.BAD_ASSETS
    with pytest.raises(ValueError, match=str(MAX_ASSETS_BYTES)):
        check_assets({f"file{number}": Asset(HASH, MAX_ASSET_BYTES) for number in range(3)})


def test_a_damaged_or_foreign_file_counts_as_missing(tmp_path: Path) -> None:
    kept = AssetFolder(tmp_path / "assets")
    wanted = describe_assets(FILES)
    assert kept.read(wanted) == {}
    kept.write(FILES)
    assert kept.read(wanted) == FILES
    for damaged in (b"", b"word", b"wordz", b"words and more"):
        (kept.path / "tokenizer.json").write_bytes(damaged)
        assert kept.read(wanted) == {"config.json": b"{}"}


def test_a_folder_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be kept"):
        AssetFolder(tmp_path / "file" / "assets").write(FILES)


def test_lost_files_are_made_again_without_signing_anew(folder: RunFolder) -> None:
    preparation = Preparation(FILES)
    signed = folder.signed_manifest(preparation)
    (folder.assets.path / "config.json").unlink()
    assert folder.signed_manifest(preparation) == signed
    assert preparation.num_calls == 2
    assert folder.assets.read(describe_assets(FILES)) == FILES
    assert folder.signed_manifest(preparation) == signed
    assert preparation.num_calls == 2


def test_lost_files_that_come_out_differently_are_an_error_and_change_nothing(folder: RunFolder) -> None:
    signed = folder.signed_manifest(Preparation(FILES))
    (folder.assets.path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"other files than there are now: tokenizer\.json") as caught:
        folder.signed_manifest(Preparation({**FILES, "tokenizer.json": b"others"}))
    assert caught.value.code is Code.BAD_ASSETS
    assert SignedManifest.from_bytes(folder.manifest_file.read_bytes()) == signed
    assert not (folder.assets.path / "tokenizer.json").exists()


def test_a_copy_without_the_key_serves_the_files_it_has(folder: RunFolder) -> None:
    preparation = Preparation(FILES)
    signed = folder.signed_manifest(preparation)
    folder.key_file.unlink()
    assert folder.signed_manifest(preparation) == signed
    assert preparation.num_calls == 1
