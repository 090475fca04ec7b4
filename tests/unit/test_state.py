"""Identity of a state, backups that are right or refused, and which history wins."""

from __future__ import annotations

import random
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from collab_core.errors import StateError
from collab_core.run.settings import OptimizerSettings
from collab_core.state.backup import read_backup, write_backup
from collab_core.state.history import Standing, Tip, goes_on_from, standing, winner
from collab_core.state.layout import Layout
from collab_core.state.replica import NO_PARENT, Replica
from collab_core.state.tensors import tree_of
from collab_core.tree import CHUNK_BYTES, BadTree, StateTree, TensorEntry

RUN = "ab" * 32


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 3))


def make_replica() -> Replica:
    model = make_model()
    layout = Layout.of(model)
    return Replica(layout, OptimizerSettings(), layout.read(model))


def test_every_tensor_counts_and_nothing_else() -> None:
    replica = make_replica()
    root = replica.freeze().root
    assert make_replica().freeze().root == root
    for name, tensor in replica.tensors().items():
        if tensor.is_floating_point() and tensor.numel():
            changed = {**replica.tensors(), name: tensor.clone()}
            changed[name].view(-1)[-1] += 1
            assert tree_of(changed).root != root, name
    replica.epoch += 1
    assert replica.freeze().root != root
    replica.epoch -= 1
    replica.parent_root = "11" * 32
    assert replica.freeze().root != root


def test_an_update_moves_epoch_parent_and_buffers() -> None:
    replica = make_replica()
    root = replica.freeze().root
    average = torch.ones(replica.layout.num_values)
    before = replica.values.clone()
    replica.update(average, root)
    assert replica.epoch == 1
    assert replica.parent_root == root
    assert replica.history == {0: root}
    num_params = replica.layout.num_params
    assert not torch.equal(replica.values[:num_params], before[:num_params])
    assert torch.equal(replica.values[num_params:], before[num_params:] + 1)  # how far they moved


def test_a_model_is_written_and_read_back_whole() -> None:
    model, other = make_model(), make_model()
    layout = Layout.of(model)
    values = torch.arange(layout.num_values, dtype=torch.float32)
    layout.write(other, values)
    assert torch.equal(layout.read(other), values)
    names = [name for name, _ in layout.buffers]
    assert names == ["1.running_mean", "1.running_var"]


def test_a_large_tensor_has_chunks_of_one_mebibyte() -> None:
    snapshot = make_replica().freeze()
    entry = next(entry for entry in snapshot.tree.entries if entry.name == "model/0.weight")
    assert len(entry.chunks) == 2
    assert snapshot.tree.chunk_sizes()[entry.chunks[0]] == CHUNK_BYTES
    assert snapshot.tree.chunk_sizes()[entry.chunks[1]] == 300 * 1000 * 4 - CHUNK_BYTES
    assert snapshot.chunk(entry.chunks[1]) is not None
    assert snapshot.chunk(b"\0" * 32) is None


def test_a_tree_from_somebody_else_must_lead_to_the_root_asked_for() -> None:
    tree = make_replica().freeze().tree
    data = tree.to_bytes()
    assert StateTree.from_bytes(data, tree.root) == tree
    with pytest.raises(BadTree):
        StateTree.from_bytes(data, "00" * 32)
    generator = random.Random(0)
    for _ in range(500):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        with pytest.raises(BadTree):
            StateTree.from_bytes(bytes(damaged), tree.root)
    for length in (0, 1, 10, len(data) - 1):
        with pytest.raises(BadTree):
            StateTree.from_bytes(data[:length], tree.root)


def test_a_chunk_cannot_have_two_sizes() -> None:
    chunk = bytes(32)
    whole = TensorEntry("a", "uint8", (CHUNK_BYTES,), (chunk,))
    tree = StateTree((whole, TensorEntry("b", "uint8", (5,), (chunk,))))
    with pytest.raises(BadTree, match="two sizes"):
        StateTree.from_bytes(tree.to_bytes(), tree.root)
    twice = StateTree((whole, TensorEntry("b", "uint8", (CHUNK_BYTES,), (chunk,))))
    assert StateTree.from_bytes(twice.to_bytes(), twice.root) == twice


def test_a_backup_comes_back_as_it_was(tmp_path: Path) -> None:
    replica = make_replica()
    replica.update(torch.ones(replica.layout.num_values), replica.freeze().root)
    snapshot = replica.freeze()
    path = tmp_path / "backup"
    write_backup(path, RUN, snapshot, replica.history, {"samples": 7})
    backup = read_backup(path, RUN)
    assert backup is not None
    other = make_replica()
    other.load(backup.tensors, backup.history)
    assert other.freeze().root == snapshot.root == backup.root
    assert other.history == replica.history
    assert backup.counters == {"samples": 7}
    with pytest.raises(StateError, match="another run"):
        read_backup(path, "cd" * 32)
    assert read_backup(tmp_path / "none", RUN) is None


def test_a_damaged_backup_is_refused_never_believed(tmp_path: Path) -> None:
    path = tmp_path / "backup"
    write_backup(path, RUN, make_replica().freeze(), {}, {})
    data = path.read_bytes()
    generator = random.Random(0)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            backup = read_backup(path, RUN)
        except StateError:
            continue
        # only the peer's own notes (history, counters) may differ unseen; the state may not
        assert backup is not None
        assert tree_of(backup.tensors).root == backup.root == make_replica().freeze().root
    for length in (0, 5, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(StateError):
            read_backup(path, RUN)


def test_a_backup_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "backup"
    write_backup(path, RUN, make_replica().freeze(), {}, {"samples": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the kernel refuses to write more, as when full
    try:
        with pytest.raises(OSError, match="File too large"):
            write_backup(path, RUN, make_replica().freeze(), {}, {"samples": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    kept = read_backup(path, RUN)
    assert kept is not None
    assert kept.counters == {"samples": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["backup"]


ROOTS = {name: name * 64 for name in "abc"}


def tip(epoch: int, root: str, samples: int = 0, *, trusted: bool = False) -> Tip:
    return Tip(epoch=epoch, root=ROOTS[root], samples=samples, peer_id=f"peer-{root}", is_trusted=trusted)


def test_the_organisers_auxiliary_wins_whatever_others_claim() -> None:
    mine, theirs = tip(9, "a", 900), tip(7, "b", 10, trusted=True)
    assert winner([theirs, tip(10**9, "c", 10**12)], mine, 100) is theirs


def test_without_one_most_samples_win_as_far_as_they_are_plausible() -> None:
    mine = tip(5, "b", 400)
    assert winner([tip(6, "a", 450)], mine, 100).epoch == 6
    assert winner([], mine, 100) is mine
    assert winner([tip(3, "a", 10**12)], mine, 100) is mine  # cut to the 300 samples three epochs can have


def test_everyone_finds_the_same_winner() -> None:
    tips = [tip(10, "b", 1000), tip(10, "a", 500), tip(12, "c", 500)]
    winners = {winner([other for other in tips if other is not mine], mine, 100).root for mine in tips}
    assert winners == {ROOTS["b"]}


def test_standing_follows_the_winner_but_never_back_along_our_own_history() -> None:
    mine = tip(5, "a")
    history = {3: ROOTS["b"], 4: ROOTS["c"]}
    assert standing(mine, mine, history) is Standing.CURRENT
    assert standing(mine, tip(6, "b"), history) is Standing.BEHIND
    assert standing(mine, tip(5, "b"), history) is Standing.DIVERGED
    assert standing(mine, tip(4, "c"), history) is Standing.CURRENT
    assert standing(mine, tip(4, "b"), history) is Standing.DIVERGED
    assert standing(mine, tip(1, "b"), history) is Standing.CURRENT
    assert NO_PARENT == "0" * 64


def test_a_history_goes_on_from_a_tip_or_from_just_before_it_or_is_too_long_to_tell() -> None:
    history = {3: ROOTS["a"], 4: ROOTS["b"], 5: ROOTS["c"]}
    here = Tip(epoch=4, root=ROOTS["b"], samples=0, peer_id="aux", parent_root=ROOTS["a"], is_trusted=True)
    assert goes_on_from(here, history)
    assert goes_on_from(replace(here, root=ROOTS["c"]), history)  # only its last epoch is another one
    assert not goes_on_from(replace(here, root=ROOTS["c"], parent_root=ROOTS["c"]), history)
    assert goes_on_from(replace(here, epoch=1, root=ROOTS["c"]), history)
    assert not goes_on_from(replace(here, epoch=9), history)
    assert not goes_on_from(here, {})
