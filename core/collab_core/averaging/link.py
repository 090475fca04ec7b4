"""What this peer's connection carries: measured while rounds use it, unless the volunteer said."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

SLOT_S = 0.25
WINDOW_SLOTS = 4  # a peak must last a second: buffers on the way swallow short bursts at any speed
NUM_ROUNDS = 8  # how long a peak is believed
MIN_BYTES = 2**20  # a round that moves less says nothing about the link


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Bytes per second; 0 if unknown."""

    download: float = 0.0
    upload: float = 0.0


class Meter:
    """One direction: the largest rate that lasted a second in any of the last rounds. Never more than the link has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: dict[int, float] = {}
        self._peaks: deque[float] = deque(maxlen=NUM_ROUNDS)
        self._lock = threading.Lock()  # every stream has a thread that counts

    def count(self, num_bytes: int, seconds: float = 0.0) -> None:
        """So much was carried within the last `seconds`: evenly, as far as anybody knows."""
        now = self._clock()
        slots = range(int((now - seconds) / SLOT_S), int(now / SLOT_S) + 1)
        with self._lock:
            for slot in slots:
                self._slots[slot] = self._slots.get(slot, 0.0) + num_bytes / len(slots)

    def end_round(self) -> None:
        """Take the peak of what was counted since the last round."""
        with self._lock:
            slots, self._slots = self._slots, {}
        if sum(slots.values()) < MIN_BYTES:
            return
        windows = (sum(slots.get(first + number, 0) for number in range(WINDOW_SLOTS)) for first in slots)
        self._peaks.append(max(windows) / (SLOT_S * WINDOW_SLOTS))

    @property
    def rate(self) -> float:
        """Bytes per second; 0 as long as nothing is known."""
        return max(self._peaks, default=0.0)


class Link:
    """Both directions.

    Args:
        declared: what the volunteer says that it carries; None measures it.
        max_upload: bytes per second that the volunteer gives at most; 0: all there are.
    """

    def __init__(self, declared: Bandwidth | None = None, max_upload: float = 0.0) -> None:
        self._declared, self._max_upload = declared, max_upload
        self.upload, self.download = Meter(), Meter()

    def end_round(self) -> None:
        self.upload.end_round()
        self.download.end_round()

    @property
    def bandwidth(self) -> Bandwidth:
        known = self._declared or Bandwidth(download=self.download.rate, upload=self.upload.rate)
        if self._max_upload:
            return replace(known, upload=min(known.upload or self._max_upload, self._max_upload))
        return known
