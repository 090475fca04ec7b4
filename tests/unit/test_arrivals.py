"""What is pushed to us waits in memory: in order, so much of it, and only while its sender is there."""

from __future__ import annotations

from collab_core.archive.encoding import Kind
from collab_core.library.arrivals import ITEM_BYTES, Arrivals

A, B = bytes(32), bytes([1]) * 32


def test_pieces_become_tensors_and_begin_again_when_one_is_lost() -> None:
    arrivals = Arrivals()
    assert arrivals.put("peer", A, Kind.RAW, None, 0, b"one") == 3
    assert arrivals.put("peer", A, Kind.RAW, None, 7, b"three") == 0
    assert arrivals.put("peer", A, Kind.RAW, None, 3, b"two") == 0
    assert arrivals.put("peer", A, Kind.DELTA, B, 0, b"one") == 3
    assert arrivals.put("peer", A, Kind.DELTA, B, 3, b"two") == 6
    (item,) = arrivals.collect("peer")
    assert (item.tensor, item.kind, item.base, list(item.pieces)) == (A, Kind.DELTA, B, [b"onetwo"])
    assert (arrivals.collect("peer"), arrivals.num_bytes) == ([], 0)


def test_all_together_send_no_more_than_there_is_room_for() -> None:
    arrivals = Arrivals(max_bytes=2 * ITEM_BYTES + 10)
    assert arrivals.put("one", A, Kind.RAW, None, 0, bytes(6)) == 6
    assert arrivals.put("two", A, Kind.RAW, None, 0, bytes(6)) == 0
    assert arrivals.put("two", A, Kind.RAW, None, 0, bytes(4)) == 4
    assert arrivals.put("two", B, Kind.RAW, None, 0, b"") == 0  # even nothing takes room


def test_what_somebody_sent_who_left_is_forgotten() -> None:
    now = 0.0
    arrivals = Arrivals(patience_s=10.0, clock=lambda: now)
    arrivals.put("left", A, Kind.RAW, None, 0, bytes(1000))
    now = 9.0
    arrivals.put("slow", B, Kind.RAW, None, 0, bytes(10))
    assert arrivals.forget_old()
    assert arrivals.num_bytes == 2 * ITEM_BYTES + 1010
    now = 11.0
    assert arrivals.put("slow", B, Kind.RAW, None, 10, bytes(10)) == 20
    assert arrivals.num_bytes == ITEM_BYTES + 20
    now = 22.0
    assert not arrivals.forget_old()
    assert (arrivals.num_bytes, arrivals.collect("slow")) == (0, [])
