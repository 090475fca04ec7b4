"""Who reduces how much: everything, by what links carry, the same numbers everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collab_core.averaging.link import MIN_BYTES, SLOT_S, Bandwidth, Link, Meter
from collab_core.averaging.shares import Load, divide

TRAINER = Load(can_reduce=True, sends=True, receives=True, upload=0.0, download=0.0)
AUX = replace(TRAINER, sends=False)
CLIENT = replace(TRAINER, can_reduce=False)
MBIT = 1e6 / 8


def linked(load: Load, download: float, upload: float) -> Load:
    return replace(load, download=download * MBIT, upload=upload * MBIT)


def duration(num_values: int, loads: list[Load], shares: list[int]) -> float:
    """How long the slowest link is busy, in seconds at one byte per value."""
    num_senders, num_receivers = sum(load.sends for load in loads), sum(load.receives for load in loads)
    times = []
    for load, share in zip(loads, shares, strict=True):
        sent = load.sends * (num_values - share) + share * (num_receivers - load.receives)
        received = load.receives * (num_values - share) + share * (num_senders - load.sends)
        times.append(max(sent / load.upload, received / load.download))
    return max(times)


@pytest.mark.parametrize("num_values", [1_000_003, 25_000_000])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_equal_or_unknown_links_get_equal_shares_and_nothing_is_left_over(num_values: int, size: int) -> None:
    for loads in (
        [TRAINER] * size,
        [linked(TRAINER, 50, 50)] * size,
        [linked(TRAINER, 50 + i % 9, 50) for i in range(size)],
    ):
        shares = divide(num_values, loads)
        assert sum(shares) == num_values
        assert max(shares) - min(shares) <= 1


def test_whoever_cannot_be_reached_reduces_nothing() -> None:
    assert divide(100_000, [CLIENT, AUX, CLIENT]) == [0, 100_000, 0]
    assert divide(100_000, [CLIENT, AUX, AUX]) == [0, 50_000, 50_000]


def test_a_small_vector_is_reduced_by_few_and_rather_by_those_who_send_nothing() -> None:
    assert divide(1, [TRAINER, TRAINER]) == [1, 0]
    assert divide(4000, [TRAINER, CLIENT, AUX, TRAINER]) == [0, 0, 4000, 0]
    assert divide(9_000, [TRAINER, CLIENT, AUX, TRAINER])[3] == 0


def test_a_slow_link_reduces_less_than_a_fast_one() -> None:
    loads = [linked(TRAINER, 100, 10), linked(TRAINER, 100, 100), linked(TRAINER, 100, 100), linked(AUX, 1000, 1000)]
    slow, first, second, aux = divide(1_000_000, loads)
    assert slow == 0  # its own contribution takes longer than everything the others do
    assert first == pytest.approx(second, abs=1)
    assert aux > first


@pytest.mark.parametrize("down_is_slow", [False, True])
def test_the_slower_direction_counts(down_is_slow: bool) -> None:
    slow = linked(TRAINER, 10, 1000) if down_is_slow else linked(TRAINER, 1000, 10)
    shares = divide(100_000, [slow, *[linked(TRAINER, 1000, 1000)] * 3])
    assert shares[0] == 0


def test_no_other_division_is_quicker() -> None:
    loads = [linked(TRAINER, 100, 20), linked(TRAINER, 50, 50), linked(AUX, 300, 300), linked(CLIENT, 30, 30)]
    num_values = 100_000
    best = min(
        duration(num_values, loads, [a, b, num_values - a - b, 0])
        for a in range(0, num_values + 1, 1000)
        for b in range(0, num_values + 1 - a, 1000)
    )
    assert duration(num_values, loads, divide(num_values, loads)) <= best * 1.001


def test_the_division_never_changes() -> None:
    """Pinned: peers of two versions in one group must come to the same parts."""
    helper = replace(AUX, receives=False)
    helpers = [linked(helper, 10, 10), linked(helper, 40, 33), linked(helper, 100, 100), helper]
    assert divide(999_983, [*helpers, linked(CLIENT, 1000, 1000), linked(CLIENT, 1000, 1000)]) == [
        41152,
        135800,
        411515,
        411516,
        0,
        0,
    ]


def test_a_meter_believes_what_lasts_a_second_and_keeps_the_best_of_the_last_rounds() -> None:
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    assert meter.rate == 0
    for _ in range(8):
        meter.count(MIN_BYTES)
        now[0] += SLOT_S
    meter.end_round()
    assert meter.rate == pytest.approx(4 * MIN_BYTES, rel=0.01)
    now[0] += 100
    meter.count(2 * MIN_BYTES)  # a burst into buffers: it says no more than its bytes in a whole second
    meter.end_round()
    assert meter.rate == pytest.approx(4 * MIN_BYTES, rel=0.01)
    for _ in range(8):
        now[0] += 100
        meter.count(MIN_BYTES)
        meter.end_round()
    assert meter.rate == pytest.approx(MIN_BYTES, rel=0.01)


def test_a_small_round_says_nothing_about_the_link() -> None:
    meter = Meter()
    meter.count(1000)
    meter.end_round()
    assert meter.rate == 0


def test_what_the_volunteer_says_is_not_measured_again() -> None:
    link = Link(Bandwidth(download=5.0, upload=6.0))
    link.upload.count(10 * MIN_BYTES)
    link.end_round()
    assert link.bandwidth == Bandwidth(download=5.0, upload=6.0)


def test_what_took_long_counts_as_having_come_evenly() -> None:
    """A piece that took ten seconds does not make a link ten times as fast."""
    meter = Meter(clock=lambda: 100.0)
    meter.count(10 * MIN_BYTES, 10.0)
    meter.end_round()
    assert 0.9 * MIN_BYTES < meter.rate <= MIN_BYTES


def test_a_volunteers_cap_is_what_the_link_carries_at_most() -> None:
    cap = 2.0 * MIN_BYTES
    unknown = Link(max_upload=cap)
    assert unknown.bandwidth == Bandwidth(upload=cap), "before anything is measured, too"
    assert Link(Bandwidth(download=5.0, upload=6.0), cap).bandwidth == Bandwidth(download=5.0, upload=6.0)
    for num_bytes, known in ((10 * MIN_BYTES, cap), (MIN_BYTES, MIN_BYTES)):
        link = Link(max_upload=cap)
        link.upload.count(num_bytes)
        link.end_round()
        assert link.bandwidth.upload == pytest.approx(known)
    capped, *others = divide(1_000_000, [linked(TRAINER, 100, 1), *[linked(TRAINER, 100, 8)] * 3])
    assert capped < min(others) / 10
