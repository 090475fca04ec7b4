"""However an archive came to be what it is: every version is a few differences away from something whole."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from collab_core.archive import Archive, Keep, Prefer, Provenance, Version, recover, verify
from collab_core.archive.encoding import Kind, encode
from collab_core.archive.packs import NewItem
from collab_core.archive.transfer import transfer
from collab_core.archive.ways import MAX_CHAIN
from collab_core.tree import RawTensor

NUM_EPOCHS = 200
State = dict[str, np.ndarray]


def states(num: int, size: int = 2000) -> list[State]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(size).astype(np.float32)
    made = []
    for _ in range(num):
        weights = weights + rng.standard_normal(size).astype(np.float32) * np.float32(1e-4)
        made.append({"model/w": weights})
    return made


def save(archive: Archive, state: State, epoch: int | None, **more: object) -> Version:
    tensors = {name: RawTensor("float32", value.shape, memoryview(value.tobytes())) for name, value in state.items()}
    return archive.save(tensors, Provenance(run_id="run", epoch=epoch), **more)  # type: ignore[arg-type]


def most_steps(archive: Archive) -> int:
    """Differences on the way that is taken to the farthest tensor of any version."""
    ways = [next(archive.store.chains(e.digest())) for v in archive.versions() for e in v.all_entries()]
    return max(sum(place.item.kind is Kind.DELTA for place in way) for way in ways)


def is_all_there(archive: Archive, made: list[State], scratch: Path) -> bool:
    """Whether every version is recovered bit for bit, and `verify` agrees."""
    for version in archive.versions():
        recover(archive, version, scratch / "back.safetensors")
        state = made[version.epoch or 0]
        assert (scratch / "back.safetensors").read_bytes().endswith(state["model/w"].tobytes())
    return verify(archive) == (len(archive.versions()), [])


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here, and there are hundreds of versions."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_no_pattern_of_garbage_collection_makes_a_long_way(tmp_path: Path) -> None:
    made = states(NUM_EPOCHS)
    for prefer in (Prefer.BALANCED, Prefer.STORAGE):
        archive = Archive(tmp_path / prefer.value, prefer=prefer)
        for epoch, state in enumerate(made):
            save(archive, state, epoch)
        for keep in (Keep(1, (2,)), Keep(1, (4,)), Keep(30, (8,)), Keep(1, (16,))):
            archive.collect_garbage(keep)
            assert most_steps(archive) <= prefer.max_steps
            assert is_all_there(archive, made, tmp_path)
        assert len(archive.versions()) == 14
        raw_bytes = sum(entry.num_bytes for version in archive.versions() for entry in version.entries())
        assert sum(archive.store.index.sizes().values()) < 0.8 * raw_bytes  # and most are still differences
        archive.close()


def test_an_archive_that_was_quick_and_is_to_be_small_gets_no_long_way(tmp_path: Path) -> None:
    made = states(100)
    quick = Archive(tmp_path / "archive", prefer=Prefer.SPEED)
    for epoch, state in enumerate(made):
        save(quick, state, epoch)
    quick.close()
    small = Archive(tmp_path / "archive", prefer=Prefer.BALANCED)
    small.settle()
    assert 0 < most_steps(small) <= Prefer.BALANCED.max_steps
    assert is_all_there(small, made, tmp_path)
    small.close()


def test_variants_of_variants_from_elsewhere_are_not_far(tmp_path: Path) -> None:
    made = states(30)
    server = Archive(tmp_path / "server")
    for epoch, state in enumerate(made):  # each device has the one before whole, and sends a difference to it
        device = Archive(tmp_path / f"device-{epoch}")
        before = save(device, made[epoch - 1], None, is_variant=True) if epoch else None
        parent = before.root if before is not None else None
        transfer(device, server, [save(device, state, epoch, parent=parent, is_variant=True)])
        device.close()
    assert 0 < most_steps(server) <= Prefer.BALANCED.max_steps
    server.settle()
    assert 0 < most_steps(server) <= Prefer.BALANCED.max_steps
    assert is_all_there(server, made, tmp_path)
    server.close()


def test_values_that_come_back_do_not_become_differences_to_each_other(archive: Archive, tmp_path: Path) -> None:
    made = states(12)
    there, back = made[0]["model/w"], made[1]["model/w"]
    epochs = [{"model/w": state["model/w"], "model/a": (there, back)[i % 2]} for i, state in enumerate(made)]
    epochs[-1]["model/a"] = made[2]["model/w"]
    versions = [save(archive, state, epoch) for epoch, state in enumerate(epochs)]
    for _ in range(2):
        for version, state in zip(versions, epochs, strict=True):
            assert all(bytes(archive.store.read(e)) == state[e.name].tobytes() for e in version.entries())
        archive.settle()
    assert most_steps(archive) <= Prefer.BALANCED.max_steps
    archive.collect_garbage(Keep(1, (3,)))
    assert verify(archive) == (5, [])


def test_a_way_that_is_too_long_is_named_and_made_short(archive: Archive, tmp_path: Path) -> None:
    """As an archive may have been left behind by somebody who knew no better."""
    made = states(80)
    quick = Archive(archive.folder, prefer=Prefer.SPEED)
    entries = [save(quick, state, epoch).entries()[0] for epoch, state in enumerate(made)]
    packs = [place.pack for entry in entries[:-1] for place in quick.store.places(entry.digest())]
    for entry, newer in pairwise(entries):
        data, base = quick.store.read(entry), quick.store.read(newer)
        pieces = list(encode(Kind.DELTA, "float32", data, base))
        quick.store.write([NewItem(entry.digest(), Kind.DELTA, newer.digest(), pieces)])
    for pack in packs:
        quick.store.drop(pack)
    quick.close()
    num_checked, bad = verify(archive)
    assert (num_checked, len(bad)) == (80, 80 - MAX_CHAIN)
    archive.settle()
    archive.settle()
    assert most_steps(archive) <= Prefer.BALANCED.max_steps
    assert is_all_there(archive, made, tmp_path)
