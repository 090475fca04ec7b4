"""Versions move between archives: only what is missing, in order, whatever the other one says. So damage is mended."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from archives import history, raw, same, save

from collab_core.archive import Archive, Provenance, Version, verify
from collab_core.archive.encoding import Kind, encode
from collab_core.archive.packs import NewItem
from collab_core.archive.transfer import transfer
from collab_core.errors import ArchiveError, Code
from collab_core.identity import Identity


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
    from collab_core.library.listing import Listing, list_versions

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
