"""The curve on a terminal."""

from __future__ import annotations

import pytest

from collab_cli.chart import Curve, draw
from collab_cli.view import FIXED_LINES, share_height


def test_a_falling_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    top, *_, bottom = draw([4.0, 3.0, 2.0, 1.0], width=40, height=4)
    assert top.startswith("4.00 ████")
    assert bottom.startswith("1.00 ")
    assert len(top) < len(bottom)
    assert bottom.endswith("▁▁▁▁"), "the lowest value is still seen"


def test_it_fits_into_its_width_however_many_values_there_are() -> None:
    for count in (1, 2, 7, 200, 5000):
        lines = draw([float(count - index) for index in range(count)], width=60, height=5)
        assert len(lines) == 5
        assert max(map(len, lines)) <= 60
    assert draw([], width=60, height=5) == []
    assert draw([1.0, 1.0], width=10, height=1) == ["1.00 ▁▁▁▁"]


def test_a_curve_takes_the_mean_of_an_epoch() -> None:
    curve = Curve()
    assert curve.add(1, 2.0)
    assert not curve.add(1, 4.0)
    assert curve.add(2, 1.0)
    assert curve.values() == [3.0, 1.0]


@pytest.mark.parametrize("num_peers", [0, 1, 2, 3, 7, 8, 40])
@pytest.mark.parametrize("height", [16, 17, 18, 20, 24, 30, 46, 50, 80])
def test_the_view_is_never_higher_than_the_terminal(height: int, num_peers: int) -> None:
    chart, rows = share_height(height, num_peers)
    assert FIXED_LINES + chart + rows + (num_peers > rows) <= height
    assert rows >= min(num_peers, 2)
    assert chart >= 3


def test_what_was_said_last_stays_above_the_view_of_a_small_swarm() -> None:
    assert share_height(24, 3) == (7, 3)
    assert share_height(50, 3) == (18, 3)
