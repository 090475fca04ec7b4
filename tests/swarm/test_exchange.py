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
