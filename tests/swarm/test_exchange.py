"""Fetching state from real peers: only what differs, every byte checked, a bad donor costs little and is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import pytest
import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from collab_core.run import Asset
from collab_core.state import exchange as exchange_module
from collab_core.state import throttle
from collab_core.state.exchange import Fetched, Sources
from collab_core.state.giving import BUSY
from collab_core.state.snapshot import Snapshot
from swarm.in_process import ToySwarm

NUM_VALUES = 1_000_000  # four chunks per tensor
MAX_UPLOAD = 3e6


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


def liar(good_answers: int) -> type:
    class Exchange(exchange_module.Exchange):
        given = 0

        async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> BytesValue:
            self.given += 1
            is_good = self.given <= good_answers  # others ask while we wait
            answer = await super().rpc_chunks(request, context)
            return answer if is_good else BytesValue(value=bytes(len(answer.value)))

    return Exchange


def fetch(
    exchange: Any, wanted: Snapshot, donors: list[str], pool: Path, own: Snapshot | None = None
) -> tuple[Fetched | None, dict[str, str]]:
    bad: dict[str, str] = {}
    sources = Sources(holders=lambda: donors, on_bad_donor=bad.__setitem__)
    return exchange.fetch_state(wanted.root, sources, own or state(), pool, threading.Event()), bad


def test_only_the_chunks_that_differ_travel(toys: ToySwarm, tmp_path: Path) -> None:
    donor, joiner = toys.add(), toys.add()
    wanted = state(changed=5)
    exchange_module.Exchange(donor.swarm).serve_state(wanted, {1: "ab" * 32})
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), wanted, [donor.swarm.peer_id], tmp_path / "pool")
    assert fetched is not None
    assert not bad
    assert fetched.num_bytes == 2**20
    assert fetched.history == {1: "ab" * 32}
    assert all(torch.equal(fetched.tensors[name], wanted.tensors[name]) for name in wanted.tensors)
    assert not (tmp_path / "pool").exists()


def test_everyone_gives_and_a_liar_is_named_and_set_aside(toys: ToySwarm, tmp_path: Path) -> None:
    good, better, bad_donor, joiner = (toys.add() for _ in range(4))
    own, wanted = state(num_values=8 * NUM_VALUES), state(8 * NUM_VALUES, num_values=8 * NUM_VALUES)
    for peer in (good, better):
        exchange_module.Exchange(peer.swarm).serve_state(wanted, {})
    liar(good_answers=2)(bad_donor.swarm).serve_state(wanted, {})
    donors = [peer.swarm.peer_id for peer in (bad_donor, good, better)]
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), wanted, donors, tmp_path / "pool", own)
    assert fetched is not None
    assert torch.equal(fetched.tensors["a"], wanted.tensors["a"])
    assert bad == {bad_donor.swarm.peer_id: "sent bytes that do not match their hash"}
    assert {good.swarm.peer_id, better.swarm.peer_id} <= set(fetched.donors)


def test_an_interrupted_download_goes_on_where_it_was(toys: ToySwarm, tmp_path: Path) -> None:
    good, bad_donor, joiner = (toys.add() for _ in range(3))
    wanted = state(changed=NUM_VALUES)
    liar(good_answers=2)(bad_donor.swarm).serve_state(wanted, {})
    exchange = exchange_module.Exchange(joiner.swarm)
    fetched, bad = fetch(exchange, wanted, [bad_donor.swarm.peer_id], tmp_path / "pool")
    assert fetched is None
    assert len(bad) == 1
    kept = (tmp_path / "pool").stat().st_size
    assert kept > 100_000  # at least the first answer; the bad one may come before the second
    with (tmp_path / "pool").open("ab") as file:
        file.write(b"a torn end")
    exchange_module.Exchange(good.swarm).serve_state(wanted, {})
    fetched, bad = fetch(exchange, wanted, [good.swarm.peer_id], tmp_path / "pool")
    assert fetched is not None
    assert not bad
    assert torch.equal(fetched.tensors["a"], wanted.tensors["a"])
    assert fetched.num_bytes <= 4 * NUM_VALUES - 0.99 * kept  # what the first one gave is not fetched again


def test_newcomers_give_each_other_what_they_have(
    toys: ToySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "ASK_AROUND_S", 0.2)
    donor, first, second = (toys.add() for _ in range(3))
    wanted = state(changed=NUM_VALUES)
    serving = exchange_module.Exchange(donor.swarm)
    serving.serve_state(wanted, {})
    serving.throttle.bytes_per_second = 2e6
    exchanges = {peer.swarm.peer_id: exchange_module.Exchange(peer.swarm) for peer in (first, second)}

    def join(peer_id: str) -> Fetched | None:
        bad: dict[str, str] = {}
        sources = Sources(
            holders=lambda: [donor.swarm.peer_id],
            newcomers=lambda: [other for other in exchanges if other != peer_id],
            on_bad_donor=bad.__setitem__,
        )
        stop = threading.Event()
        fetched = exchanges[peer_id].fetch_state(wanted.root, sources, state(), tmp_path / peer_id, stop)
        assert not bad
        return fetched

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(join, exchanges))
    assert all(fetched is not None and torch.equal(fetched.tensors["a"], wanted.tensors["a"]) for fetched in results)
    assert any(set(fetched.donors) & exchanges.keys() for fetched in results if fetched is not None)


def test_a_donor_gives_no_more_than_it_wants_to_and_is_not_blamed_for_it(
    toys: ToySwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "MAX_WAIT_S", 0.5)  # so that it soon says that it is busy
    donor, *joiners = (toys.add() for _ in range(3))
    own, wanted = state(num_values=2 * NUM_VALUES), state(2 * NUM_VALUES, num_values=2 * NUM_VALUES)
    answers: list[bytes] = []

    class Exchange(exchange_module.Exchange):
        async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> BytesValue:
            answer = await super().rpc_chunks(request, context)
            answers.append(answer.value)
            return answer

    serving = Exchange(donor.swarm)
    serving.serve_state(wanted, {})
    serving.throttle.bytes_per_second = MAX_UPLOAD
    start = time.monotonic()

    def join(exchange: exchange_module.Exchange) -> tuple[Fetched | None, dict[str, str]]:
        return fetch(exchange, wanted, [donor.swarm.peer_id], tmp_path / str(id(exchange)), own)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(join, [exchange_module.Exchange(joiner.swarm) for joiner in joiners]))
    seconds = time.monotonic() - start
    assert BUSY in answers
    for fetched, bad in results:
        assert fetched is not None
        assert not bad
        assert torch.equal(fetched.tensors["a"], wanted.tensors["a"])
    given = sum(len(answer) for answer in answers if answer != BUSY)
    assert 0.5 * MAX_UPLOAD < given / seconds < 1.05 * MAX_UPLOAD


def test_a_donor_without_the_state_a_foreign_model_and_a_dead_peer_are_only_lost_donors(
    toys: ToySwarm, tmp_path: Path
) -> None:
    empty, foreign, dead, joiner = toys.add(), toys.add(), toys.add(), toys.add()
    other = state(num_values=7)
    exchange_module.Exchange(empty.swarm)
    exchange_module.Exchange(foreign.swarm).serve_state(other, {})
    dead.swarm.close()
    donors = [peer.swarm.peer_id for peer in (empty, foreign, dead)]
    fetched, bad = fetch(exchange_module.Exchange(joiner.swarm), other, donors, tmp_path / "pool")
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
                yield BytesValue(value=piece.value[:-1] + b"!" if piece.value else b"")

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


def test_a_connection_that_breaks_while_a_file_comes_costs_another_question(toys: ToySwarm) -> None:
    only, joiner = toys.add(), toys.add()
    files = {"config.json": b"{}", "nothing.txt": b""}
    breaks = [b"", b"{"]

    class Exchange(exchange_module.Exchange):
        async def rpc_asset(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            if breaks and request.value == Asset.of(b"{}").hash.encode():
                if sent := breaks.pop(0):
                    yield BytesValue(value=sent)
                return
            async for piece in super().rpc_asset(request, context):
                yield piece

    Exchange(only.swarm).serve_assets(files)
    bad: list[str] = []
    wanted = {name: Asset.of(data) for name, data in files.items()}
    joining = exchange_module.Exchange(joiner.swarm)
    assert joining.fetch_assets(wanted, [only.swarm.peer_id], lambda _, reason: bad.append(reason)) == files
    assert bad == ["the connection broke (ConnectionResetError)"] * 2


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
