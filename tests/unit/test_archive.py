"""Every version comes back bit for bit; what is damaged is named, and never handed out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
from archives import history, raw, same, save
from blake3 import blake3

from collab_core.archive import Archive, Keep, Provenance, Version, recover, verify
from collab_core.archive.catalogue import is_name
from collab_core.archive.costs import Prefer
from collab_core.archive.store import Damaged
from collab_core.archive.version import BadVersion, _canonical, _message
from collab_core.errors import ArchiveError, Code, ConfigError
from collab_core.identity import Identity

NUM_FLIPS = 1000
FOREIGN = ("../out.json", "/tmp/out.json", ".hidden", "a/b.json", "model.safetensors", "json.py", "Makefile", "x.pth")
"""Names that no file from somebody else may have."""


def test_all_versions_come_back_in_few_steps_and_old_ones_are_small(archive: Archive) -> None:
    epochs = list(history(20))
    versions = [save(archive, weights) for weights in epochs]
    assert all(same(archive, version, weights) for version, weights in zip(versions, epochs, strict=True))
    chains = [len(next(archive.store.chains(e.digest()))) for version in versions for e in version.entries()]
    assert max(chains) <= Prefer.BALANCED.max_steps
    raw_bytes = sum(entry.num_bytes for version in versions for entry in version.entries())
    assert sum(archive.store.index.sizes().values()) < 0.7 * raw_bytes
    assert verify(archive) == (20, [])


def test_the_archive_is_torch_free() -> None:
    code = "import sys, collab_core.archive; sys.exit('torch' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def test_saving_the_same_twice_keeps_it_once(archive: Archive) -> None:
    (weights,) = history(1)
    assert save(archive, weights).root == save(archive, weights).root
    assert len(archive.versions()) == 1


def test_a_version_is_found_by_tag_epoch_root_and_latest(archive: Archive) -> None:
    versions = [save(archive, weights) for weights in history(3)]
    archive.tag("good", versions[1])
    for reference, index in (("good", 1), ("epoch:0", 0), ("latest", 2), (versions[0].root[:8], 0)):
        assert archive.find(reference).root == versions[index].root
    for reference in ("epoch:7", "nothing", "", "abc"):
        with pytest.raises(ArchiveError) as caught:
            archive.find(reference)
        assert caught.value.code is Code.NO_VERSION


def test_a_variant_is_kept_as_a_difference_to_its_parent(archive: Archive) -> None:
    versions = [save(archive, weights) for weights in history(3)]
    *_, weights = history(3)
    changed = {**weights, "model/w0": weights["model/w0"] * np.float32(1.0001)}
    before = sum(archive.store.index.sizes().values())
    tensors = {name: raw(value) for name, value in changed.items()}
    variant = archive.save(tensors, Provenance(), parent=versions[-1].root, is_variant=True)
    assert sum(archive.store.index.sizes().values()) - before < 0.8 * changed["model/w0"].nbytes
    more = list(history(12))
    for epoch in more[3:]:
        save(archive, epoch)  # the parent becomes a difference itself
    assert same(archive, variant, changed)
    assert verify(archive)[1] == []


def test_garbage_collection_keeps_what_should_be_kept(archive: Archive) -> None:
    epochs = list(history(25))
    versions = [save(archive, weights) for weights in epochs]
    archive.tag("mine", versions[3])
    before = sum(archive.store.index.sizes().values())
    archive.collect_garbage(Keep(last=4, every=(10,)))
    assert [version.epoch for version in archive.versions()] == [0, 3, 10, 20, 21, 22, 23, 24]
    assert sum(archive.store.index.sizes().values()) < 0.6 * before
    assert verify(archive) == (8, [])
    assert all(same(archive, version, epochs[version.epoch or 0]) for version in archive.versions())


def test_a_difference_counts_only_what_would_move(archive: Archive) -> None:
    from collab_core.archive import report

    first, second = history(2)
    first["optimizer/m"], second["optimizer/m"] = np.zeros(5000), np.ones(5000)
    old, new = (save(archive, weights, stored="model/", files={"a.txt": b"a"}) for weights in (first, second))
    found = report.diff(archive, old, new)
    assert (found["changed"], found["transfer_bytes"]) == (3, 3 * second["model/w0"].nbytes)


def test_the_index_is_only_a_memory(tmp_path: Path) -> None:
    epochs = list(history(5))
    archive = Archive(tmp_path)
    versions = [save(archive, weights) for weights in epochs]
    archive.close()
    for damage in (b"", b"not a database at all", os.urandom(5000)):
        (tmp_path / "index.sqlite").write_bytes(damage)
        archive = Archive(tmp_path)
        assert same(archive, versions[0], epochs[0])
        archive.close()


def test_recovered_files_are_right(archive: Archive, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    epochs = list(history(3))
    for weights in epochs:
        save(archive, weights, files={"config.json": b"{}"})
    recover(archive, archive.find("epoch:0"), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == {"w0", "w1", "w2", "frozen"}
    assert all((loaded[name] == epochs[0][f"model/{name}"]).all() for name in loaded)
    recover(archive, archive.find("epoch:1"), tmp_path / "folder")
    assert (tmp_path / "folder" / "config.json").read_bytes() == b"{}"
    assert (load_file(tmp_path / "folder" / "model.safetensors")["w0"] == epochs[1]["model/w0"]).all()


def test_no_flipped_bit_goes_unnoticed_or_leads_to_a_wrong_model(tmp_path: Path) -> None:
    """Seeded single-bit flips in packs, versions, tags and index."""
    epochs = list(history(6))
    archive = Archive(tmp_path / "archive")
    versions = [save(archive, weights) for weights in epochs]
    archive.tag("good", versions[2])
    archive.close()
    files = sorted(path for path in archive.folder.rglob("*") if path.is_file() and path.suffix != ".key")
    files = [path for path in files if path.stat().st_size]  # all but the lock
    assert {path.suffix for path in files} == {".pack", ".json", ".sqlite"}
    rng = random.Random(0)
    num_found = num_flipped = 0
    for _ in range(NUM_FLIPS):
        path = rng.choice(files)
        content = path.read_bytes()
        position = rng.randrange(8 * len(content))
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        num_flipped += path.read_bytes() != content
        opened = Archive(archive.folder)
        index = rng.randrange(len(versions))
        found = {version.root: version for version in opened.versions()}
        version = found.get(versions[index].root)
        with contextlib.suppress(Damaged):
            is_noticed = True
            assert version is None or same(opened, version, epochs[index])
            is_noticed = version is None
        if path.suffix != ".sqlite":  # which is made anew
            assert verify(opened)[1], f"bit {position} of {path.name} flipped unnoticed"
        num_found += is_noticed
        opened.close()
        path.write_bytes(content)
    assert num_flipped == NUM_FLIPS
    assert num_found > 50


def test_a_pack_that_does_not_begin_as_one_is_named_and_still_read(archive: Archive) -> None:
    (weights,) = history(1)
    version = save(archive, weights)
    (pack,) = (archive.folder / "packs").glob("*.pack")
    pack.write_bytes(b"x" + pack.read_bytes()[1:])
    assert len(verify(archive)[1]) == 1
    assert same(archive, version, weights)


def test_sweeping_a_pack_of_tiny_tensors_loses_none(archive: Archive) -> None:
    (base,) = history(1)
    parent = save(archive, base)
    tuned = {**base, "model/bias": np.arange(4, dtype=np.float32)}
    variant = save(archive, tuned, parent=parent.root, is_variant=True)
    for _ in range(3):
        archive.settle()
        assert same(archive, variant, tuned)
    assert verify(archive) == (2, [])


@pytest.mark.parametrize(
    "change",
    [
        {"created": "x"},
        {"created": None},
        {"parent": []},
        {"stored": 1},
        {"is_variant": "yes"},
        {"provenance": {"epoch": "x"}},
        {"provenance": {"epoch": 2**60}},
        {"provenance": {"loss": float("nan")}},
        {"provenance": {"held_out_loss": float("inf")}},
        {"provenance": {"loss": 10**400}},
        {"provenance": {"recipe": {"command": "rm"}}},
        {"provenance": {"recipe": {"command": ["x"], "code": {}, "data": {}, "seconds": "x"}}},
        {"level": "[/x]"},
        {"files": [["a.json", 2**40, []]]},
        *({"files": [[name, 0, []]]} for name in FOREIGN),
        {"signer": "1" * 1000},
    ],
)
def test_a_signed_version_that_makes_no_sense_is_none(archive: Archive, change: dict[str, object]) -> None:
    (weights,) = history(1)
    version = save(archive, weights)
    body = json.loads(archive.version_bytes(version.root)) | change
    del body["signature"]
    identity = Identity.load_or_create(archive.folder / "identity.key")
    body["signature"] = identity.sign(_message(body)).hex()
    with pytest.raises(BadVersion):
        Version.from_bytes(_canonical(body), version.root)


def test_nothing_is_deleted_on_the_word_of_an_index_that_lost_what_it_knew(archive: Archive) -> None:
    epochs = list(history(4))
    versions = [save(archive, weights) for weights in epochs]
    database = sqlite3.connect(archive.folder / "index.sqlite")
    database.execute("DELETE FROM items")  # as if only some of its pages had reached the disk
    database.commit()
    database.close()
    archive.settle()
    assert verify(archive) == (4, [])
    assert all(same(archive, version, weights) for version, weights in zip(versions, epochs, strict=True))


def test_a_writer_goes_on_after_somebody_else_made_the_index_anew(archive: Archive) -> None:
    first, second = history(2)
    save(archive, first)
    other = Archive(archive.folder)
    (archive.folder / "index.sqlite").unlink()
    save(archive, second)
    other.store.index.renew()
    assert verify(other) == (2, [])
    assert all(other.store.has(entry.digest()) for version in other.versions() for entry in version.entries())
    other.close()


def test_what_has_a_name_stays_when_the_names_cannot_be_read(archive: Archive) -> None:
    versions = [save(archive, weights) for weights in history(30)]
    archive.tag("best", versions[3])
    names = archive.folder / "tags.json"
    names.write_bytes(names.read_bytes().replace(b"best", b"rest"))
    for action in (lambda: archive.collect_garbage(Keep(last=5)), lambda: archive.tag("other", versions[4])):
        with pytest.raises(ArchiveError) as caught:
            action()
        assert caught.value.code is Code.DAMAGED_VERSION
    assert len(archive.versions()) == 30


def test_while_a_version_cannot_be_read_nothing_of_it_is_thrown_away(archive: Archive) -> None:
    versions = [save(archive, weights) for weights in history(6)]
    path = archive.folder / "versions" / f"{versions[2].root}.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    again = Archive(archive.folder)
    again.collect_garbage(Keep(last=2))
    path.write_bytes(whole)
    assert verify(again)[1] == []
    assert versions[2].root in {version.root for version in Archive(archive.folder).versions()}
    again.close()


@pytest.mark.parametrize("name", ["", "latest", "epoch:3", "c0ffee", "a" * 101, "\x1b[31m", "\udcff", "ab12" * 16])
def test_a_name_means_nothing_else_and_can_be_shown(archive: Archive, name: str) -> None:
    (weights,) = history(1)
    with pytest.raises(ConfigError):
        archive.tag(name, save(archive, weights))
    assert not is_name(name)


def test_a_root_is_found_by_itself_whatever_somebody_called_another_version(archive: Archive) -> None:
    first, second = (save(archive, weights) for weights in history(2))
    tags = {first.root: second.root, "cafe": second.root}
    body = {"tags": tags, "digest": blake3(json.dumps(tags, sort_keys=True).encode()).hexdigest()}
    (archive.folder / "tags.json").write_text(json.dumps(body, sort_keys=True))
    assert archive.find(first.root).root == first.root
    assert archive.find(first.root[:12]).root == first.root
    assert archive.find("cafe").root == second.root  # from before names could not look like that
