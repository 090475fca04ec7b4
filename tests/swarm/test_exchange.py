"""Fetching state from real peers: only what differs, every byte checked, a bad donor costs little and is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import pytest
import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from collab_core.run import Asset
from collab_core.state import exchange as exchange_module
from collab_core.state.exchange import Fetched
from collab_core.state.snapshot import Snapshot
from swarm.in_process import ToySwarm

NUM_VALUES = 1_000_000  # four chunks per tensor


@pytest.fixture
def toys(short_folder: Path) -> Iterator[ToySwarm]:
    made = ToySwarm(short_folder, 10)
    yield made
    made.close()


def state(changed: int = 0, *, num_values: int = NUM_VALUES) -> Snapshot:
    tensors = {name: torch.arange(num_values, dtype=torch.float32) * scale for name, scale in (("a", 1.0), ("b", 2.0))}
    tensors["a"][:changed] += 1
    tensors["run/epoch"] = torch.tensor(3)
    return Snapshot(3, tensors)


def liar() -> type:
    class Exchange(exchange_module.Exchange):
        async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            index = 0
            async for chunk in super().rpc_chunks(request, context):
                yield chunk if index < 2 else BytesValue(value=bytes(len(chunk.value)))
                index += 1

    return Exchange


def fetch(exchange: Any, wanted: Snapshot, donors: list[str], own: Snapshot) -> tuple[Fetched | None, dict[str, str]]:
    bad: dict[str, str] = {}
    return exchange.fetch_state(wanted.root, donors, own, bad.__setitem__, threading.Event()), bad


def test_only_the_chunks_that_differ_travel(toys: ToySwarm) -> None:
    donor, joiner = toys.add(), toys.add()
    wanted, own = state(changed=5), state()
    exchange_module.Exchange(donor.swarm).serve_state(wanted, {1: "ab" * 32})
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), wanted, [donor.swarm.peer_id], own)
    assert fetched is not None
    assert not bad
    assert fetched.num_bytes == 2**20
    assert fetched.history == {1: "ab" * 32}
    assert all(torch.equal(fetched.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


def test_a_liar_is_named_and_the_next_donor_goes_on_from_there(toys: ToySwarm) -> None:
    good, bad_donor, joiner = toys.add(), toys.add(), toys.add()
    wanted = state(changed=NUM_VALUES)
    exchange_module.Exchange(good.swarm).serve_state(wanted, {})
    liar()(bad_donor.swarm).serve_state(wanted, {})
    donors = [bad_donor.swarm.peer_id, good.swarm.peer_id]
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), wanted, donors, state())
    assert fetched is not None
    assert torch.equal(fetched.tensors["a"], wanted.tensors["a"])
    assert bad == {bad_donor.swarm.peer_id: "sent bytes that do not match their hash"}
    assert fetched.donors == (good.swarm.peer_id,)
    assert fetched.num_bytes == 4 * NUM_VALUES  # each differing chunk counted once: the liar's good ones were kept


def test_a_donor_without_the_state_a_foreign_model_and_a_dead_peer_are_only_lost_donors(toys: ToySwarm) -> None:
    empty, foreign, dead, joiner = toys.add(), toys.add(), toys.add(), toys.add()
    other = state(num_values=7)
    exchange_module.Exchange(empty.swarm)
    exchange_module.Exchange(foreign.swarm).serve_state(other, {})
    dead.swarm.close()
    donors = [peer.swarm.peer_id for peer in (empty, foreign, dead)]
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), other, donors, state())
    assert fetched is None
    assert bad[empty.swarm.peer_id] == "no longer holds that state"
    assert bad[foreign.swarm.peer_id] == "sent the state of another model"
    assert "connection broke" in bad[dead.swarm.peer_id]


def test_the_runs_files_come_from_whoever_has_them_and_every_byte_is_checked(toys: ToySwarm) -> None:
    empty, bad_donor, good, joiner = (toys.add() for _ in range(4))
    files = {"config.json": b"{}", "tokenizer.json": bytes(range(256)) * 10_000}  # the second takes three messages
    wanted = {name: Asset.of(data) for name, data in files.items()}

    class Exchange(exchange_module.Exchange):
        async def rpc_asset(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            async for piece in super().rpc_asset(request, context):
                yield BytesValue(value=piece.value[:-1] + b"!")

    exchange_module.Exchange(empty.swarm)
    Exchange(bad_donor.swarm).serve_assets(files)
    exchange_module.Exchange(good.swarm).serve_assets(files)
    donors = [peer.swarm.peer_id for peer in (empty, bad_donor, good)]
    bad: dict[str, str] = {}
    fetched = exchange_module.Exchange(joiner.swarm).fetch_assets(wanted, donors, bad.__setitem__)
    assert fetched == files
    assert bad == {
        empty.swarm.peer_id: "does not have the run's files",
        bad_donor.swarm.peer_id: "sent a file that does not match its hash",
    }


def test_a_file_that_does_not_end_is_cut_off(toys: ToySwarm) -> None:
    endless, joiner = toys.add(), toys.add()
    sent = 0

    class Exchange(exchange_module.Exchange):
        async def rpc_asset(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            nonlocal sent
            while True:
                sent += 1
                yield BytesValue(value=bytes(1000))

    Exchange(endless.swarm)
    bad: dict[str, str] = {}
    wanted = {"config.json": Asset("ab" * 32, 5000)}
    joining = exchange_module.Exchange(joiner.swarm)
    assert joining.fetch_assets(wanted, [endless.swarm.peer_id], bad.__setitem__) == {}
    assert bad == {endless.swarm.peer_id: "sent a file that is too large"}
