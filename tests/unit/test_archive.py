"""Every version comes back bit for bit; what is damaged is named, and never handed out."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from collab_core.archive import Archive, Keep, Provenance, Version, recover, verify
from collab_core.archive.archive import MAX_STEPS
from collab_core.archive.store import Damaged
from collab_core.errors import ArchiveError, Code
from collab_core.tree import RawTensor

Weights = dict[str, np.ndarray]


def raw(array: np.ndarray) -> RawTensor:
    return RawTensor(str(array.dtype), array.shape, memoryview(array.tobytes()))


def history(num_epochs: int, seed: int = 0) -> Iterator[Weights]:
    """A model whose body moves a little every epoch, with a frozen part."""
    rng = np.random.default_rng(seed)
    weights = {f"model/w{i}": rng.standard_normal((64, 40)).astype(np.float32) for i in range(3)}
    frozen = rng.standard_normal((64, 40)).astype(np.float32)
    for epoch in range(num_epochs):
        for name in weights:
            weights[name] = weights[name] + rng.standard_normal((64, 40)).astype(np.float32) * np.float32(1e-3)
        yield {**weights, "model/frozen": frozen, "run/epoch": np.array(epoch)}


def save(archive: Archive, weights: Weights, **more: object) -> Version:
    provenance = Provenance(run_id="run", epoch=int(weights["run/epoch"]))
    return archive.save({name: raw(value) for name, value in weights.items()}, provenance, **more)  # type: ignore[arg-type]


def same(archive: Archive, version: Version, weights: Weights) -> bool:
    return all(bytes(archive.store.read(entry)) == weights[entry.name].tobytes() for entry in version.entries())


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    made = Archive(tmp_path / "archive")
    yield made
    made.close()


def test_all_versions_come_back_in_few_steps_and_old_ones_are_small(archive: Archive) -> None:
    epochs = list(history(20))
    versions = [save(archive, weights) for weights in epochs]
    assert all(same(archive, version, weights) for version, weights in zip(versions, epochs, strict=True))
    chains = [len(next(archive.store.chains(e.digest()))) for version in versions for e in version.entries()]
    assert max(chains) <= MAX_STEPS
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
    rng = random.Random(0)
    num_found = 0
    for _ in range(1000):
        path = rng.choice(files)
        content = path.read_bytes()
        if not content:
            continue
        position = rng.randrange(8 * len(content))
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
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
    assert num_found > 50


def test_only_what_is_missing_moves_to_another_archive(archive: Archive, tmp_path: Path) -> None:
    from collab_core.archive.transfer import transfer

    versions = [save(archive, weights) for weights in history(4)]
    server = Archive(tmp_path / "server")
    transfer(archive, server, reversed(versions))
    *_, weights = history(4)
    changed = {**weights, "model/w1": weights["model/w1"] * np.float32(1.0001)}
    tensors = {name: raw(value) for name, value in changed.items()}
    variant = archive.save(tensors, Provenance(), parent=versions[-1].root, is_variant=True)
    moved = transfer(archive, server, [variant])
    assert (moved.versions, moved.bytes < 0.8 * changed["model/w1"].nbytes) == (1, True)
    assert same(server, server.find(variant.root[:8]), changed)
    assert verify(server) == (5, [])
    assert transfer(archive, server, [variant, *versions]).bytes == 0
    server.close()


def test_a_version_that_lies_is_not_taken(archive: Archive, tmp_path: Path) -> None:
    from collab_core.archive.transfer import missing_items

    (first, second) = (save(archive, weights) for weights in history(2))
    server = Archive(tmp_path / "server")
    items = list(missing_items(archive, server, first))
    for data, root in (
        (archive.version_bytes(first.root), second.root),
        (archive.version_bytes(first.root).replace(b'"epoch":0', b'"epoch":9'), first.root),
        (archive.version_bytes(second.root), second.root),  # whose tensors are not there
    ):
        with pytest.raises(ArchiveError) as caught:
            server.take(data, root, items)
        assert caught.value.code is Code.DAMAGED_VERSION
    assert server.versions() == []
    assert server.store.index.sizes() == {}
    server.close()


def test_damage_to_one_step_does_not_keep_the_next_ones_out(archive: Archive) -> None:
    epochs = list(history(4))
    save(archive, epochs[0])
    (pack,) = (archive.folder / "packs").glob("*.pack")
    content = bytearray(pack.read_bytes())
    content[15_000] ^= 1  # in a tensor that only this version has, and that is to become a difference
    pack.write_bytes(content)
    versions = [save(archive, weights) for weights in epochs[1:]]
    assert all(same(archive, version, weights) for version, weights in zip(versions, epochs[1:], strict=True))
    assert len(verify(archive)[1]) == 1
