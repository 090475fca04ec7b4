"""Exact averaging with peers that lie or dawdle: nothing wrong gets in, and who did it is named."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from collab_core.averaging import averager as averager_module
from collab_core.averaging.link import Bandwidth, Link
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Frame, Kind
from swarm.in_process import NUM_VALUES, ToySwarm, same_bits, vectors


def hostile(message: Any) -> type:
    """An averager that sends something wrong."""

    class Liar(Reduction):
        def _outgoing(self, parts: list[Any]) -> Iterator[Frame]:
            for index, honest in enumerate(super()._outgoing(parts)):
                yield message(honest, index)

    return averager_with(Liar)


def averager_with(kind: type[Reduction]) -> type:
    """The class keeps its name: it is part of the RPC's name."""

    class ExactAverager(averager_module.ExactAverager):
        def _reduction(self, *arguments: Any) -> Reduction:
            reduction = super()._reduction(*arguments)
            reduction.__class__ = kind
            return reduction

    return ExactAverager


class Trickling(Reduction):
    """Reduces what it should, and gives it away so slowly that it is just not silent."""

    def _give(self, line: Any, payload: bytearray) -> None:
        time.sleep(3.0)  # of the 4 s after which it would be silent
        super()._give(line, payload)


def test_a_reducer_that_holds_everyone_up_holds_them_up_once(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averager_module, "MIN_BYTES_PER_SECOND", 1e9)
    # On a busy machine even an answer may take seconds; whoever leads must not close its group with only the slow one.
    toys = ToySwarm(short_folder, NUM_VALUES, averaging_timeout_s=2.0, matchmaking_time_s=6.0)
    try:
        slow = toys.add("aux", kind=averager_with(Trickling))
        slow.averager._link = Link(Bandwidth(download=1e9, upload=1e9))  # it says so, and believes no measurement
        quick = [toys.add(), toys.add()]
        toys.meet()
        first, second = vectors(2)
        by_lot = {"rank": lambda peer: 1, "own_rank": 1, "is_patient": False}
        for epoch, attempts in enumerate((3, 1)):  # it comes to every one; from the second epoch on that harms nobody
            is_over = threading.Event()

            def dawdle(epoch: int = epoch, is_over: threading.Event = is_over) -> None:
                while not is_over.is_set():
                    slow.round(None, 0.0, epoch=epoch, should_stop=is_over.is_set, **by_lot)

            with ThreadPoolExecutor(3) as pool:
                dawdling = pool.submit(dawdle)
                futures = [
                    pool.submit(peer.insist, values, 10.0, attempts=attempts, epoch=epoch, **by_lot)
                    for peer, values in zip(quick, (first, second), strict=True)
                ]
                outcomes = [future.result(timeout=60) for future in futures]
                is_over.set()
                dawdling.result(timeout=60)
            assert same_bits([outcome.average for outcome in outcomes]), [outcome.failure for outcome in outcomes]
            for peer in toys.peers:
                peer.averager.set_epoch(epoch + 1)
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
