"""Meetings in pairs: whatever breaks, each side holds exactly its old value or the average, and both agree at last."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import wait_until

from collab_core.gossip import Outcome
from collab_core.gossip.mean import Share, weighted_mean
from collab_core.swarm import directory
from swarm.gossip_peers import NUM_VALUES, CutAt, ToyGossiper, acquaint

pytestmark = pytest.mark.timeout(120)

BEFORE_READY = [
    "ask-offer",
    "ask-accepted",
    "ask-halfway",
    "ask-swapped",
    "answer-offered",
    "answer-accepted",
    "answer-halfway",
]
DROPPED = ["ask-ready", "answer-swapped", "answer-ready"]
EITHER = ["ask-told"]  # the READY on its way may arrive or not
COMMITTED = ["ask-heard", "answer-decided"]


class Pair:
    """Two peers, what they hold, and what they would hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asker = ToyGossiper(folder / "asker", vector(1), weight=3.0)
        self.asked = ToyGossiper(folder / "asked", vector(2), weight=1.0, first=self.asker.swarm.addresses[0])
        acquaint(self.asker, self.asked)

    def wait_until_free(self) -> None:
        """Who was cut off is busy until it notices."""
        peers = (self.asker, self.asked)
        wait_until(lambda: all(peer.meetings._current is None for peer in peers), "both to end their meeting")

    def renew(self) -> None:
        """The same two with other values and nothing on their minds."""
        self.wait_until_free()
        for peer, seed in ((self.asker, 3), (self.asked, 4)):
            peer.values, peer.faults = vector(seed) + len(peer.met), None
            peer.met.clear()
            peer.log.clear()
        self.old = self.asker.values.clone(), self.asked.values.clone()
        self.average = weighted_mean(Share(self.asker.id, self.old[0], 3.0), Share(self.asked.id, self.old[1], 1.0))

    def cut(self, stage: str, then: Callable[[], None] = lambda: None) -> Outcome:
        """Meet, and lose the connection at that stage."""
        self.renew()
        fault = CutAt(stage, then)
        (self.asker if stage.startswith("ask-") else self.asked).faults = fault
        outcome = self.asker.meet(self.asked)
        assert fault.has_failed.wait(5), stage
        return outcome

    def assert_nothing_happened(self) -> None:
        assert torch.equal(self.asker.values, self.old[0])
        assert torch.equal(self.asked.values, self.old[1])

    def assert_both_have_the_average(self) -> None:
        assert torch.equal(self.asker.values, self.average)
        assert torch.equal(self.asked.values, self.average)

    def close(self) -> None:
        self.asked.close()
        self.asker.close()


def vector(seed: int) -> torch.Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(directory, "HEARTBEAT_S", 0.5)  # who dies is gone sooner
    monkeypatch.setattr(directory, "STORE_PERIOD_S", 0.5)
    monkeypatch.setattr(directory, "RECORD_LIFETIME_S", 3.0)
    made = Pair(short_folder)
    yield made
    made.close()


def test_both_sides_hold_the_same_bits_after_a_meeting_and_old_or_average_after_any_cut(pair: Pair) -> None:
    pair.renew()
    assert pair.asker.meet(pair.asked) is Outcome.MET
    wait_for_average(pair)

    for stage in BEFORE_READY:
        assert pair.cut(stage) is Outcome.FAILED, stage
        failed = pair.asker if stage.startswith("ask-") else pair.asked
        failed.wait_for("exchange_failed")
        pair.assert_nothing_happened()

    for stage in DROPPED:
        outcome = pair.cut(stage)
        assert outcome is Outcome.IN_DOUBT or stage == "answer-swapped", stage  # there the asker may be slower
        if outcome is Outcome.IN_DOUBT:
            assert pair.asker.wait_for("exchange_settled")["outcome"] == "aborted", stage
        pair.assert_nothing_happened()

    for stage in EITHER + COMMITTED:
        assert pair.cut(stage) is Outcome.IN_DOUBT, stage
        settled = pair.asker.wait_for("exchange_settled")["outcome"]
        assert settled == "committed" or stage in EITHER
        if settled == "committed":
            wait_for_average(pair)
        else:
            pair.assert_nothing_happened()

    assert pair.cut("answer-told") is Outcome.MET
    wait_for_average(pair)
    pair.wait_until_free()
    assert pair.asker.meet(pair.asked) is Outcome.MET, "a peer is still busy with something that was cut"


def wait_for_average(pair: Pair) -> None:
    wait_until(lambda: len(pair.asker.met) == len(pair.asked.met) == 1, "both to take the average")
    pair.assert_both_have_the_average()


def test_what_was_learnt_while_in_doubt_stays_on_top_of_the_average(pair: Pair) -> None:
    learnt = torch.full((NUM_VALUES,), 0.25)
    with pair.asker.pausing():
        assert pair.cut("ask-heard") is Outcome.IN_DOUBT
        pair.asker.values = pair.asker.values + learnt
    wait_until(lambda: bool(pair.asker.met), "the average")
    assert torch.allclose(pair.asker.values, pair.average + learnt, atol=1e-6)
    assert torch.equal(pair.asked.values, pair.average)


def test_a_partner_that_dies_takes_only_that_exchange_with_it_and_it_is_logged(pair: Pair) -> None:
    pair.asker.meetings._doubts._gone_s = 0.5
    assert pair.cut("answer-decided", then=pair.asked.die) is Outcome.IN_DOUBT
    lost = pair.asker.wait_for("exchange_lost")
    assert lost["peer_id"] == pair.asked.id
    assert torch.equal(pair.asker.values, pair.old[0])


def test_whoever_dies_at_whatever_stage_takes_at_most_that_exchange_with_it_and_comes_back(pair: Pair) -> None:
    for stage in (*BEFORE_READY, *DROPPED, *EITHER, *COMMITTED, "answer-told"):
        dying, other = (pair.asker, pair.asked) if stage.startswith("ask-") else (pair.asked, pair.asker)
        outcome = pair.cut(stage, then=dying.die)
        wait_until(lambda: other.meetings._current is None, f"the other one to notice ({stage})")  # noqa: B023
        dying.close()
        mine, theirs = pair.old if dying is pair.asker else pair.old[::-1]
        dying.values = mine  # as it was when it last wrote a backup
        dying.met.clear()
        dying.start(kept=())
        if outcome is Outcome.IN_DOUBT and other is pair.asker:
            wait_until(lambda: bool(other.told("exchange_settled") or other.told("exchange_lost")), stage)  # noqa: B023
        with other.pausing():
            assert torch.equal(dying.values, mine), stage
            assert torch.equal(other.values, pair.average if other.met else theirs), stage
            assert dying.told("exchange_lost") or not other.met, stage
        acquaint(pair.asker, pair.asked)


@pytest.mark.parametrize("is_in_backup", [False, True])
def test_a_partner_that_restarts_answers_by_what_its_backup_holds(pair: Pair, is_in_backup: bool) -> None:
    assert pair.cut("answer-decided", then=pair.asked.die) is Outcome.IN_DOUBT
    wait_until(lambda: bool(pair.asked.met), "the asked side to take the average")
    exchange = pair.asked.met[0].exchange
    pair.asked.close()
    if not is_in_backup:
        pair.asked.values = pair.old[1]
    pair.asked.start(kept=(exchange,) if is_in_backup else ())

    settled = pair.asker.wait_for("exchange_settled")
    if is_in_backup:
        assert settled["outcome"] == "committed"
        wait_until(lambda: bool(pair.asker.met), "the average")
        pair.assert_both_have_the_average()
    else:
        assert settled["outcome"] == "aborted"
        assert pair.asked.wait_for("exchange_lost")["exchange"] == exchange
        pair.assert_nothing_happened()


def test_two_that_ask_each_other_at_once_meet_once_and_a_third_is_told_that_they_are_busy(pair: Pair) -> None:
    pair.renew()
    with ThreadPoolExecutor(2) as pool:
        outcomes = [
            pool.submit(pair.asker.meet, pair.asked),
            pool.submit(pair.asked.meet, pair.asker),
        ]
        told = {outcome.result(timeout=20) for outcome in outcomes}
    assert Outcome.MET in told
    assert told <= {Outcome.MET, Outcome.BUSY}, told
    wait_for_average(pair)
    with pair.asked.pausing(), ThreadPoolExecutor(1) as pool:  # it answers nobody until it has a moment
        pair.renew()
        third = ToyGossiper(pair.folder / "third", vector(9), first=pair.asker.swarm.addresses[0], client_mode=True)
        try:
            first = pool.submit(pair.asker.meet, pair.asked)
            wait_until(lambda: pair.asked.meetings.is_waiting, "the first to come")
            assert third.meet(pair.asked) is Outcome.BUSY
            pair.asked.meetings.hand_out(pair.asked.values.clone())
            assert first.result(timeout=20) is Outcome.MET
            pair.asked.take()
            pair.assert_both_have_the_average()
            pair.asker.throttle.bytes_per_second = 2 * NUM_VALUES
            begun = time.monotonic()
            epoch_and_values = third.meetings.fetch(pair.asker.id, third.stop)
            assert epoch_and_values is not None
            assert time.monotonic() - begun > 1.8, "no faster than its volunteer allows"
            assert torch.equal(epoch_and_values[1], pair.average), "a newcomer takes the model of anybody"
            assert third.meet(pair.asker) is Outcome.MET, "one of the two can be reached: that is enough"
        finally:
            third.close()


def test_who_breaks_a_rule_is_refused_by_name_and_changes_nothing(pair: Pair) -> None:
    terms = pair.asker.meetings._terms
    for number, (change, values, reason) in enumerate(
        [
            ({"weight": 1e30}, None, "a weight of 1e+30"),
            ({"layout": b"other"}, None, "another shape"),
            ({}, torch.zeros(10), "40 bytes instead of"),
            ({}, torch.full((NUM_VALUES,), torch.nan), "not finite"),
            ({}, torch.full((NUM_VALUES,), 3e38), "values as large as 3e+38"),
        ]
    ):
        pair.renew()
        pair.asker.meetings._terms = replace(terms, **change)  # type: ignore[arg-type]
        pair.asker.values = pair.asker.values if values is None else values
        assert pair.asker.meet(pair.asked) is not Outcome.MET
        refused = pair.asked.wait_for("refused")
        assert refused["peer_id"] == pair.asker.id
        assert reason in refused["reason"], number
        assert torch.equal(pair.asked.values, pair.old[1])
    pair.asker.meetings._terms = terms
    pair.asker.wait_for("exchange_settled")  # the last one ended in doubt: it had said READY before it was refused
    pair.renew()
    pair.asker.meetings.epoch = 1_000_000
    assert pair.asker.meet(pair.asked) is Outcome.MET
    wait_for_average(pair)
    assert pair.asked.meetings.epoch == 10, "nobody ends everyone's run by saying that it is over"
    pair.asker.meetings.epoch = 0
    pair.renew()
    assert pair.asker.meet(pair.asked) is Outcome.MET, "it is welcome again once it keeps to the rules"


def test_two_that_meet_are_in_the_mean_of_their_rounds_unless_one_trains_no_more(pair: Pair) -> None:
    for rounds, is_over, expected in (
        ((10, 20), False, (15, 15)),
        ((21, 10), False, (15, 16)),
        ((30, 10), True, (30, 10)),
    ):
        pair.renew()
        pair.asker.meetings.epoch, pair.asked.meetings.epoch = rounds
        pair.asker.meetings.is_training = not is_over
        assert pair.asker.meet(pair.asked) is Outcome.MET
        wait_for_average(pair)
        assert (pair.asker.meetings.epoch, pair.asked.meetings.epoch) == expected


class CutsNowAndThen:
    """Breaks one in ten exchanges at each stage."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.is_on = True

    def reached(self, stage: str, epoch: int) -> None:
        if self.is_on and self._chance.random() < 0.1:
            raise ConnectionResetError


def test_many_at_once_over_links_that_break_conserve_the_weighted_sum_and_the_rounds(
    pair: Pair, closing: Callable[[Callable[[], None]], None]
) -> None:
    peers = [pair.asker, pair.asked]
    for number in (2, 3):
        address = pair.asker.swarm.addresses[0]
        peers.append(ToyGossiper(pair.folder / str(number), vector(10 + number), weight=number, first=address))
        closing(peers[-1].close)
    acquaint(*peers)
    for number, peer in enumerate(peers):
        peer.meetings.epoch = 5 * number
    before = sum(peer.values.double() * peer.weight for peer in peers)
    chance = random.Random(0)

    def meet_others(peer: ToyGossiper) -> None:
        for _ in range(30):
            peer.meet(chance.choice([other for other in peers if other is not peer]))
            time.sleep(chance.uniform(0, 0.05))  # and be there for others

    faults = [CutsNowAndThen(seed) for seed in range(len(peers))]
    for peer, fault in zip(peers, faults, strict=True):
        peer.faults = fault
    with ThreadPoolExecutor(len(peers)) as pool:
        for future in [pool.submit(meet_others, peer) for peer in peers]:
            future.result(timeout=60)
    events = [event["event"] for peer in peers for event in peer.log]
    assert events.count("exchange_in_doubt") > 2, events
    assert sum(len(peer.met) for peer in peers) > 10
    for fault in faults:
        fault.is_on = False

    def is_settled() -> bool:
        return not any(peer.meetings._doubts._tasks or peer.meetings._current for peer in peers)

    wait_until(is_settled, "everything that was in doubt to be settled")
    for peer in peers:
        with peer.pausing():
            peer.take()
    after = sum(peer.values.double() * peer.weight for peer in peers)
    assert float((after - before).abs().max()) < 1e-4, "what they hold together is not what it was"
    assert sum(peer.meetings.epoch for peer in peers) == 5 * (0 + 1 + 2 + 3)
