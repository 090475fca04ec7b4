"""The past of a run, in a bounded number of points: when there are too many, every second one of them is dropped."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Series(Generic[Value]):
    """Values by time, evenly spread over the whole run, and always the newest one.

    Args:
        max_points: how many to keep; at least half as many are there, once there were so many.
        is_steady: values come all the time, so one that comes sooner than the others lie apart takes the place of the
            one before it. Otherwise each counts.
    """

    def __init__(self, max_points: int, *, is_steady: bool) -> None:
        self._max_points, self._is_steady = max_points, is_steady
        self._points: dict[int, Value] = {}
        self._gap_ms = 0
        self._settled = 0
        """Time of the last point that stays; the newest one may still be replaced."""

    def add(self, time_s: float, value: Value) -> None:
        """Values come in the order of their time; a clock that was set back costs what lies after it."""
        now = int(time_s * 1000)
        while self._points and (latest := next(reversed(self._points))) >= now:
            del self._points[latest]
            self._settled = min(self._settled, now)
        if self._points and self._is_steady:
            latest = next(reversed(self._points))
            if latest - self._settled < self._gap_ms:
                del self._points[latest]
            else:
                self._settled = latest
        self._points[now] = value
        if len(self._points) > self._max_points:
            self._thin()

    def _thin(self) -> None:
        times = list(self._points)
        for time in times[1:-1:2]:
            del self._points[time]
        kept = list(self._points)
        self._settled = kept[-2]
        self._gap_ms = (kept[-1] - kept[0]) // len(kept)

    def points(self) -> dict[int, Value]:
        """By time in ms, oldest first."""
        return dict(self._points)

    @property
    def last(self) -> Value | None:
        return next(reversed(self._points.values()), None)
