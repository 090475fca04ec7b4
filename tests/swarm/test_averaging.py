"""Exact averaging between real daemons: same bytes for everyone, nothing wrong gets in, all parts or nothing."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.losses.table import Table
from hivemind.proto import averaging_pb2

from collab_core.averaging import averager as averager_module
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Frame, Kind
from swarm.in_process import ToyPeer, ToySwarm

NUM_VALUES = 300_001  # several parts per reducer, and an odd size


@pytest.fixture
def toys(short_folder: Path) -> Iterator[ToySwarm]:
    made = ToySwarm(short_folder, NUM_VALUES)
    yield made
    made.close()


def vectors(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(count)]


def same_bits(values: list[torch.Tensor | None]) -> bool:
    return all(value is not None and values[0] is not None and torch.equal(value, values[0]) for value in values)


TOLERANCE = {"none": 1e-6, "fp16": 4e-3, "int8": 0.05, "int4": 0.8}
"""How far an average of values around 1 may be off. What it was off by comes later, so sums are off by no more."""


@pytest.mark.parametrize("codec", [*TOLERANCE])
def test_everyone_gets_the_same_bytes_of_the_weighted_mean(short_folder: Path, codec: str) -> None:
    toys = ToySwarm(short_folder, NUM_VALUES, codec)
    try:
        toys.add("aux")
        toys.add()
        toys.add(client_mode=True)
        toys.add()
        toys.meet()
        total_sent, total_received = torch.zeros(NUM_VALUES), torch.zeros(NUM_VALUES)
        for epoch in range(4):
            first, second, third = vectors(3, seed=epoch)
            outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 30.0), (third, 60.0), epoch=epoch)
            averages = [outcome.average for outcome in outcomes]
            assert same_bits(averages), [outcome.failure for outcome in outcomes]
            expected = 0.1 * first + 0.3 * second + 0.6 * third
            assert averages[0] is not None
            torch.testing.assert_close(averages[0], expected, rtol=0, atol=TOLERANCE[codec])
            total_sent += expected
            total_received += averages[0]
            assert outcomes[0].members == {
                peer.swarm.peer_id: weight for peer, weight in zip(toys.peers[1:], (10.0, 30.0, 60.0), strict=True)
            }
            for peer in toys.peers:
                peer.averager.set_epoch(epoch + 1)
        torch.testing.assert_close(total_received, total_sent, rtol=0, atol=max(5e-6, TOLERANCE[codec]))
        if codec == "fp16":
            sent = [outcome.bytes_sent for outcome in outcomes]
            assert sent[2] == 2 * NUM_VALUES  # the client-mode peer reduces nothing
    finally:
        toys.close()


def hostile(message: Any) -> type:
    """An averager that sends something wrong."""

    class Liar(Reduction):
        async def _outgoing(self, parts: list[Any]) -> AsyncIterator[Frame]:
            index = 0
            async for honest in super()._outgoing(parts):
                yield message(honest, index)
                index += 1

    return averager_with(Liar)


def averager_with(kind: type[Reduction]) -> type:
    """The class keeps its name: it is part of the RPC's name."""

    class ExactAverager(averager_module.ExactAverager):
        def _reduction(self, group: Any, request: Any, draft: Any) -> Reduction:
            reduction = super()._reduction(group, request, draft)
            reduction.__class__ = kind
            return reduction

    return ExactAverager


class Trickling(Reduction):
    """Reduces what it should, and gives it away so slowly that it is just not silent."""

    async def _send(self, stream: Any, frame: Frame) -> None:
        await asyncio.sleep(3.5)  # of the 4 s after which it would be silent
        await super()._send(stream, frame)


def test_a_reducer_that_holds_everyone_up_holds_them_up_once(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averager_module, "MIN_BYTES_PER_SECOND", 1e9)
    toys = ToySwarm(short_folder, NUM_VALUES, averaging_timeout_s=2.0)
    try:
        slow = toys.add("aux", kind=averager_with(Trickling))
        toys.add()
        toys.add()
        toys.meet()
        first, second = vectors(2)
        by_lot = {"rank": lambda peer: 1, "own_rank": 1, "is_patient": False}
        brought = [(None, 0.0), (first, 10.0), (second, 30.0)]
        with ThreadPoolExecutor(3) as pool:
            futures = [
                pool.submit(peer.insist, *given, **by_lot) for peer, given in zip(toys.peers, brought, strict=True)
            ]
            outcomes = [future.result(timeout=60) for future in futures][1:]
        assert same_bits([outcome.average for outcome in outcomes]), [outcome.failure for outcome in outcomes]
        for peer in toys.peers:
            peer.averager.set_epoch(1)
        # it is there, and expected; but nobody asks it for anything, whoever should have led by lot
        outcomes = toys.rounds(None, *brought[1:], epoch=1, **by_lot)
        assert same_bits([outcome.average for outcome in outcomes]), [outcome.failure for outcome in outcomes]
        assert all(slow.swarm.peer_id in peer.averager._slow for peer in toys.peers[1:])
    finally:
        toys.close()


def with_nan(honest: Frame, index: int) -> Frame:
    payload = bytearray(honest.payload)
    if index == 0:
        struct.pack_into("<f", payload, 400, float("nan"))
    return replace(honest, payload=payload)


def with_huge_weight(honest: Frame, index: int) -> Frame:
    return replace(honest, weight=1e30)


def with_other_weight(honest: Frame, index: int) -> Frame:
    return replace(honest, weight=honest.weight + 1)


def with_wrong_size(honest: Frame, index: int) -> Frame:
    return replace(honest, payload=honest.payload[:-4])


def ten_times_larger(honest: Frame, index: int) -> Frame:
    values = torch.frombuffer(bytearray(honest.payload), dtype=torch.float32) * 10
    return replace(honest, payload=bytearray(values.numpy().tobytes()))


def with_another_kind(honest: Frame, index: int) -> Frame:
    return replace(honest, kind=Kind.AVERAGE)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (with_nan, "not finite"),
        (with_huge_weight, "above the run's limit"),
        (with_other_weight, "declared a weight of 50"),
        (with_wrong_size, "bytes instead of"),
        (with_another_kind, "did not come"),
        (ten_times_larger, "exceeds the norm"),
    ],
)
def test_a_wrong_part_enters_no_average_and_its_sender_is_named(toys: ToySwarm, message: Any, reason: str) -> None:
    toys.add("aux")
    toys.add()
    toys.add()
    toys.add(kind=hostile(message), client_mode=True)
    toys.meet()
    first, second = vectors(2)
    poison = torch.full((NUM_VALUES,), 1e6)
    outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 30.0), (poison, 50.0))
    honest = [outcome.average for outcome in outcomes[:3]]
    assert same_bits(honest), [outcome.failure for outcome in outcomes]
    assert honest[0] is not None
    torch.testing.assert_close(honest[0], 0.25 * first + 0.75 * second, rtol=0, atol=1e-5)
    assert outcomes[3].average is None
    # the first reducer to refuse it ends its part in the round; the others see it go
    refusals = [refusal for peer in toys.peers[:3] for refusal in peer.refusals()]
    assert refusals
    assert all(reason in refusal for refusal in refusals), refusals
    quarantined = [event for peer in toys.peers[:3] for event in peer.told("quarantined")]
    assert {event["peer_id"] for event in quarantined} == {toys.peers[3].swarm.peer_id}
    assert all(reason in event["reason"] for event in quarantined)


def test_who_declares_far_more_than_most_is_scaled_down_and_named_by_everyone(toys: ToySwarm) -> None:
    toys.add("aux")
    for _ in range(3):
        toys.add()
    loud = toys.add(client_mode=True, name="loud")
    toys.meet()
    *calm, large = vectors(4)
    outcomes = toys.rounds((None, 0.0), *((values, 10.0) for values in calm), (100 * large, 10.0))
    averages = [outcome.average for outcome in outcomes]
    assert same_bits(averages), [outcome.failure for outcome in outcomes]
    assert averages[0] is not None
    typical = sorted(float(values.norm()) for values in (*calm, 100 * large))[1]
    factor = (2 * typical / float(100 * large.norm())) ** 2
    expected = (sum(calm) + factor * 100 * large) / 4
    torch.testing.assert_close(averages[0], expected, rtol=0, atol=1e-4)
    for peer in toys.peers:
        (told,) = peer.told("clipped")
        assert told["senders"] == {"loud": pytest.approx(factor, abs=1e-4)}
        assert not peer.told("quarantined")
    assert not loud.refusals()


def test_one_of_four_that_lies_within_the_rules_changes_little_if_the_run_trims(short_folder: Path) -> None:
    toys = ToySwarm(short_folder, NUM_VALUES, "fp16", reduction="trimmed-mean")
    try:
        for _ in range(4):
            toys.add()
        toys.meet()
        direction = vectors(1)[0]
        honest = [direction + 0.5 * noise for noise in vectors(3, seed=1)]
        outcomes = toys.rounds(*((values, 10.0) for values in honest), (-10 * direction, 1000.0))
        averages = [outcome.average for outcome in outcomes]
        assert same_bits(averages), [outcome.failure for outcome in outcomes]
        assert averages[0] is not None
        assert float((averages[0] - direction).norm()) < 0.6 * float(direction.norm())
    finally:
        toys.close()


def test_a_weight_above_the_limit_is_refused_when_it_asks_to_join(toys: ToySwarm) -> None:
    aux = toys.add("aux")
    toys.add()
    toys.add(client_mode=True)
    toys.meet()
    first, second = vectors(2)
    outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 1e30))
    assert same_bits([outcome.average for outcome in outcomes[:2]])
    assert outcomes[0].average is not None
    torch.testing.assert_close(outcomes[0].average, first)
    assert outcomes[2].average is None
    assert any("above the run's limit" in refusal for refusal in aux.refusals())


def test_a_norm_that_is_none_is_refused_when_it_asks_to_join(toys: ToySwarm) -> None:
    aux = toys.add("aux")
    toys.add()
    liar = toys.add(client_mode=True)
    liar.averager._toolbox.norm = lambda *contribution: math.nan  # type: ignore[method-assign]
    toys.meet()
    first, second = vectors(2)
    outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 10.0))
    assert same_bits([outcome.average for outcome in outcomes[:2]])
    assert outcomes[2].average is None
    assert any("is not the norm of a contribution" in refusal for refusal in aux.refusals())


def test_whoever_asked_closes_the_stream_of_the_answer(toys: ToySwarm) -> None:
    leader, asking = toys.add(), toys.add()
    toys.meet()

    async def ask() -> tuple[int, bool]:
        stub = asking.averager._stub_of(leader.swarm.peer_id)
        stream = await stub.rpc_join_group(averaging_pb2.JoinRequest(gather=b"junk"))
        message = await anext(stream)
        _, still_open = await asyncio.wait({asyncio.ensure_future(anext(stream))}, timeout=1)
        return message.code, bool(still_open)

    code, is_open = asking.swarm.reactor.run(ask(), timeout_s=10)
    assert code == averaging_pb2.PROTOCOL_VIOLATION
    assert is_open, "whoever sends last and closes first may lose what it sent"


def test_who_lied_is_turned_away_in_words_and_comes_back_when_its_time_is_over(toys: ToySwarm) -> None:
    aux = toys.add("aux")
    toys.add()
    liar = toys.add(client_mode=True)
    toys.meet()
    first, second = vectors(2)
    aux.averager.quarantine.caught(liar.swarm.peer_id, "part 0 has values that are not finite")
    outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 10.0), epoch=3)
    assert same_bits([outcome.average for outcome in outcomes[:2]])
    assert outcomes[0].average is not None
    torch.testing.assert_close(outcomes[0].average, first)
    assert outcomes[0].matchmaking_s < 2, "nobody waits for it"
    assert "until epoch 10: part 0 has values that are not finite" in outcomes[2].failure
    (told,) = liar.told("kept_out")
    assert (told["until_epoch"], told["said_by"]) == (10, aux.swarm.name)
    for peer in toys.peers:
        peer.averager.set_epoch(10)
    outcomes = toys.rounds((None, 0.0), (first, 10.0), (second, 10.0), epoch=10)
    assert same_bits([outcome.average for outcome in outcomes]), [outcome.failure for outcome in outcomes]
    assert set(outcomes[0].members) == {peer.swarm.peer_id for peer in toys.peers[1:]}


def test_peers_elsewhere_in_history_are_not_averaged_in(toys: ToySwarm) -> None:
    for _ in range(3):
        toys.add()
    toys.meet()
    first, second, third = vectors(3)
    # everyone believes to be expected by everyone, but the third stands on another root
    here = [toys.peers[0], toys.peers[1]]
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(toys.peers[0].insist, first, 1.0),
            pool.submit(toys.peers[1].insist, second, 1.0),
            pool.submit(toys.peers[2].round, third, 1.0, parent_root="ff" * 32),
        ]
        outcomes = [future.result(timeout=60) for future in futures]
    assert same_bits([outcomes[0].average, outcomes[1].average])
    assert outcomes[0].average is not None
    torch.testing.assert_close(outcomes[0].average, (first + second) / 2, rtol=0, atol=1e-6)
    assert outcomes[2].average is None
    assert all(set(outcome.members) == {peer.swarm.peer_id for peer in here} for outcome in outcomes[:2])


def test_who_asks_for_an_epoch_that_is_over_is_told_so(toys: ToySwarm) -> None:
    ahead = toys.add("aux")
    late = toys.add()
    toys.meet()
    ahead.averager.set_epoch(5)
    outcome = late.round(vectors(1)[0], 1.0, epoch=4)
    assert outcome.is_behind


def hang_up_on_others(peer: ToyPeer) -> None:
    """From now on this peer takes what others send, and hangs up instead of giving them an average."""
    make = peer.averager._reduction

    def made(*arguments: Any) -> Reduction:
        reduction = make(*arguments)

        async def hang_up(stream: Any, sender: str) -> Kind:
            await reduction._receive(stream, sender)
            raise ConnectionResetError

        reduction._answer = hang_up  # type: ignore[method-assign]
        return reduction

    peer.averager._reduction = made  # type: ignore[method-assign]


def test_a_round_that_fails_changes_neither_the_contribution_nor_what_is_owed(short_folder: Path) -> None:
    toys = ToySwarm(short_folder, NUM_VALUES, "int8")
    try:
        sound = toys.add()
        hang_up_on_others(toys.add())
        toys.meet()
        first, second = vectors(2)
        before = first.clone()
        for _ in range(3):  # on a busy machine the other one may come too late
            outcome, _ = toys.rounds((first, 1.0), (second, 1.0))
            if outcome.members:
                break
        assert outcome.average is None
        assert outcome.bytes_sent > 0
        assert "lost the reducer" in outcome.failure
        assert torch.equal(first, before)
        assert sound.averager._toolbox._feedback[0].residue is None
    finally:
        toys.close()


def test_the_round_waits_for_the_slow_but_not_for_ever(toys: ToySwarm) -> None:
    for _ in range(3):
        toys.add()
    toys.meet()
    values = vectors(3)
    for epoch, num_peers in enumerate((3, 2)):
        with ThreadPoolExecutor(3) as pool:
            futures = []
            for peer, own, wait_s in list(zip(toys.peers, values, (0.0, 0.0, 1.0), strict=True))[:num_peers]:
                time.sleep(wait_s)
                futures.append(pool.submit(peer.insist, own, 1.0, epoch=epoch))
            outcomes = [future.result(timeout=60) for future in futures]
        assert same_bits([outcome.average for outcome in outcomes])
        assert all(len(outcome.members) == num_peers for outcome in outcomes)
        longest = max(outcome.matchmaking_s for outcome in outcomes)
        assert (0.9 if num_peers == 3 else 2.0) < longest < 20
        for peer in toys.peers:
            peer.averager.set_epoch(epoch + 1)


def test_two_peers_of_one_name_are_told_apart(toys: ToySwarm) -> None:
    first, second, third = (toys.add(name=name) for name in ("anna", "anna", "bert"))
    toys.meet()
    names = [third.swarm.name_of(peer.swarm.peer_id) for peer in (first, second, third)]
    assert names == ["anna", f"anna-{second.swarm.peer_id[-4:]}", "bert"]


def test_rounds_without_a_network_give_the_same_bits(short_folder: Path) -> None:
    """What the benchmark of losses trains with: the same averages, round after round, and the same bytes sent."""
    toys = ToySwarm(short_folder, NUM_VALUES, "int4", name="diloco")
    table: Table | None = None
    try:
        toys.add()
        toys.add()
        toys.meet()
        table = Table(toys.settings, [NUM_VALUES], [peer.swarm.peer_id for peer in toys.peers])
        for epoch in range(2):  # the second one has something to make good
            first, second = vectors(2, seed=epoch)
            outcomes = toys.rounds((first, 10.0), (second, 30.0), epoch=epoch)
            before = table.bytes_sent
            averages = table.round(epoch, [first, second], [10.0, 30.0])
            assert same_bits([*averages, *(outcome.average for outcome in outcomes)])
            assert table.bytes_sent - before == sum(outcome.bytes_sent for outcome in outcomes)
            for peer in toys.peers:
                peer.averager.set_epoch(epoch + 1)
    finally:
        toys.close()
        if table is not None:
            table.close()
