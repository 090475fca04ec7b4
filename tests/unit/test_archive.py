"""Every version comes back bit for bit; what is damaged is named, and never handed out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from collab_core.archive import Archive, Keep, Provenance, Version, recover, verify
from collab_core.archive.costs import Prefer
from collab_core.archive.encoding import Kind, encode
from collab_core.archive.packs import NewItem
from collab_core.archive.store import Damaged
from collab_core.archive.transfer import transfer
from collab_core.archive.version import BadVersion, _canonical, _message
from collab_core.errors import ArchiveError, Code
from collab_core.identity import Identity
from collab_core.tree import RawTensor

Weights = dict[str, np.ndarray]
NUM_FLIPS = 1000


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


def test_only_what_is_missing_moves_to_another_archive(archive: Archive, tmp_path: Path) -> None:
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


def test_any_damage_is_mended_by_an_archive_that_is_sound(archive: Archive, tmp_path: Path) -> None:
    epochs = list(history(4))
    versions = [save(archive, weights) for weights in epochs]
    copy = Archive(tmp_path / "copy")
    whole = transfer(archive, copy, versions).bytes
    copy.close()
    files = [path for folder in ("packs", "versions") for path in sorted((copy.folder / folder).iterdir())]
    sound = {path: path.read_bytes() for path in files}
    num_moved = 0
    for flip in random.Random(1).sample(range(8 * sum(map(len, sound.values()))), 60):
        position = flip
        for path in files:
            if position < 8 * len(sound[path]):
                break
            position -= 8 * len(sound[path])
        changed = bytearray(sound[path])
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        damaged = Archive(copy.folder)
        moved = transfer(archive, damaged, versions)
        assert verify(damaged) == (4, []), (path, position)
        assert all(same(damaged, version, weights) for version, weights in zip(versions, epochs, strict=True))
        assert moved.bytes <= whole
        num_moved += moved.bytes > 0
        damaged.close()
        for left in (copy.folder / "packs").iterdir():
            left.unlink()
        for path, content in sound.items():
            path.write_bytes(content)
    assert num_moved > 30


def test_mending_moves_only_what_is_damaged(archive: Archive, tmp_path: Path) -> None:
    (weights,) = history(1)
    version = save(archive, weights)
    copy = Archive(tmp_path / "copy")
    whole = transfer(archive, copy, [version]).bytes
    (pack,) = (copy.folder / "packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    moved = transfer(archive, copy, [version])
    assert (moved.versions, 0 < moved.bytes < whole / 3) == (1, True)  # one tensor of four
    assert verify(copy) == (1, [])
    assert transfer(archive, copy, [version]).versions == 0
    copy.close()


def test_all_versions_move_after_what_they_are_differences_to(archive: Archive, tmp_path: Path) -> None:
    from collab_core.archive.transfer import chosen

    versions = [save(archive, weights) for weights in history(4)]
    *_, weights = history(4)
    parent = versions[-1]
    for _ in range(3):
        weights = {name: value * np.float32(1.0001) for name, value in weights.items() if name != "run/epoch"}
        tensors = {name: raw(value) for name, value in weights.items()}
        parent = archive.save(tensors, Provenance(), parent=parent.root, is_variant=True)
        versions.append(parent)
    order = [version.root for version in chosen(archive, None)]
    assert order == [versions[index].root for index in (3, 2, 1, 0, 4, 5, 6)]
    assert [version.root for version in chosen(archive, [parent.root, "epoch:0", "latest"])] == [
        versions[index].root for index in (3, 0, 6)
    ]
    server = Archive(tmp_path / "server")
    moved = transfer(archive, server, chosen(archive, None))
    assert moved.bytes < 1.1 * sum(archive.store.index.sizes().values())
    server.close()


def test_another_archives_versions_are_found_and_put_in_order_whatever_it_says(archive: Archive) -> None:
    from collab_core.archive.transfer import in_order
    from collab_core.listing import Listing, list_versions

    versions = [save(archive, weights) for weights in history(3)]
    (other,) = history(1, seed=1)
    variant = save(archive, {**other, "run/epoch": np.array(2)}, parent=versions[0].root, is_variant=True)
    archive.tag("mine", variant)
    listing = Listing.parse(list_versions(archive))
    for reference, version in (("mine", variant), ("epoch:2", versions[2]), (versions[1].root[:9], versions[1])):
        assert listing.find(reference) == archive.find(reference).root == version.root
    assert [listing.find(reference) for reference in ("epoch:3", "epoch:x", "epoch:", "nothing", "")] == [None] * 5
    assert in_order(listing.roots, listing.made_from)[-1] == variant.root
    a, b = "aa" * 32, "bb" * 32
    circle = Listing.parse([[a, b], {}, [[None, True, b], [None, True, a]]])
    assert sorted(in_order(circle.roots, circle.made_from)) == [a, b]
    assert Listing.parse([[a], {"tag": a}]).find("tag") == a  # from a peer that says no more
    for nonsense in ([[a], {}, [[1, 2]]], [[a], {}, [[None, True, b]] * 2], [[a]], 5):
        with pytest.raises((TypeError, AttributeError, IndexError, ValueError)):
            Listing.parse(nonsense)


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


def test_a_push_that_fails_takes_nothing_with_it(archive: Archive, tmp_path: Path) -> None:
    """Sending what is there already, with a version that is none, is no way to delete it."""
    from collab_core.archive.transfer import missing_items

    (weights,) = history(1)
    parent = save(archive, weights)
    tuned = {**weights, "model/w0": weights["model/w0"] * np.float32(1.0001)}
    mine = save(archive, tuned, parent=parent.root, is_variant=True)
    server = Archive(tmp_path / "server")
    again = list(missing_items(archive, server, mine))
    transfer(archive, server, [mine])
    packs = server.store.index.sizes()
    (other,) = history(1, seed=1)
    lie = Archive(tmp_path / "liar")
    theirs = save(lie, other)
    junk = NewItem(bytes(32), Kind.RAW, None, [b"belongs to nobody"])
    for data, root in ((b"{}", mine.root), (lie.version_bytes(theirs.root), theirs.root)):
        with pytest.raises(ArchiveError):
            server.take(data, root, [*again, junk])
    assert server.store.index.sizes() == packs
    story = Version(tree=mine.tree, parent=None, is_variant=True, created=0.0, provenance=Provenance(run_id="x"))
    signed = story.to_bytes(Identity.load_or_create(lie.folder / "identity.key"))
    assert server.take(signed, mine.root, [junk]).provenance.run_id == "run"
    assert server.version_bytes(mine.root) == archive.version_bytes(mine.root)
    assert server.store.index.sizes() == packs
    assert same(server, mine, tuned)
    server.close()
    lie.close()


def test_differences_in_a_circle_are_not_taken(archive: Archive, tmp_path: Path) -> None:
    version = save(archive, {"model/a": np.zeros(4), "model/b": np.ones(4), "run/epoch": np.array(0)}, stored="model/")
    first, second = version.entries()
    pieces = list(encode(Kind.DELTA, "float64", archive.store.read(first), archive.store.read(second)))
    items = [
        NewItem(first.digest(), Kind.DELTA, second.digest(), pieces),
        NewItem(second.digest(), Kind.DELTA, first.digest(), pieces),
    ]
    data = archive.version_bytes(version.root)
    server = Archive(tmp_path / "server")
    with pytest.raises(ArchiveError, match="not what it says"):
        server.take(data, version.root, items)
    assert server.store.index.sizes() == {}
    archive.store.write(items)  # even where it came to be: it is read from what is whole, and swept
    for epoch in range(1, 4):
        save(archive, {"model/a": np.full(4, epoch), "model/b": np.ones(4), "run/epoch": np.array(epoch)})
    archive.settle()
    assert same(archive, version, {"model/a": np.zeros(4), "model/b": np.ones(4)})
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


@pytest.mark.parametrize("name", ["../escaped.json", "/tmp/escaped.json", ".hidden", "a/b.json", "model.safetensors"])
def test_a_version_whose_files_would_land_elsewhere_is_none(archive: Archive, name: str) -> None:
    (weights,) = history(1)
    version = save(archive, weights, files={name: b"{}"})
    with pytest.raises(BadVersion, match="names"):
        Version.from_bytes(archive.version_bytes(version.root), version.root)


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
        {"files": [["a.json", 2**40, []]]},
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
