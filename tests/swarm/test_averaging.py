"""Exact averaging between real daemons: same bytes for everyone, all parts or nothing."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.losses.table import Table
from hivemind.proto import averaging_pb2
from processes import wait_until

from collab_core.averaging.link import Bandwidth
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Kind
from swarm.in_process import NUM_VALUES, ToyPeer, ToySwarm, same_bits, vectors

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


def test_what_volunteers_say_of_their_links_decides_how_much_each_reduces(toys: ToySwarm) -> None:
    toys.add("aux", bandwidth=Bandwidth(download=1e6, upload=1e6))  # which would reduce most, as it sends nothing
    for _ in range(2):
        toys.add(bandwidth=Bandwidth(download=120e6, upload=120e6))
    toys.meet()
    first, second = vectors(2)
    outcomes = toys.rounds((None, 0.0), (first, 1.0), (second, 1.0))
    assert same_bits([outcome.average for outcome in outcomes]), [outcome.failure for outcome in outcomes]
    of_slow, *of_fast = (outcome.share for outcome in outcomes)
    assert of_slow < 0.1
    assert min(of_fast) > 0.4


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
        sent = 0
        for epoch in range(2):  # the second one has something to make good
            first, second = vectors(2, seed=epoch)
            outcomes = toys.rounds((first, 10.0), (second, 30.0), epoch=epoch)
            before = table.bytes_sent
            averages = table.round(epoch, [first, second], [10.0, 30.0])
            assert same_bits([*averages, *(outcome.average for outcome in outcomes)])
            assert table.bytes_sent - before == sum(outcome.bytes_received for outcome in outcomes)
            sent += sum(outcome.bytes_sent for outcome in outcomes)
            for peer in toys.peers:
                peer.averager.set_epoch(epoch + 1)
        # what others still fetched when our round was over is told with the next one
        wait_until(lambda: sent + sum(peer.averager._sent_late for peer in toys.peers) == table.bytes_sent, "all sent")
    finally:
        toys.close()
        if table is not None:
            table.close()
