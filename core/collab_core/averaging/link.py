"""What this peer's connection carries: measured while rounds use it, unless the volunteer said."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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
        self._slots: dict[int, int] = {}
        self._peaks: deque[float] = deque(maxlen=NUM_ROUNDS)

    def count(self, num_bytes: int) -> None:
        slot = int(self._clock() / SLOT_S)
        self._slots[slot] = self._slots.get(slot, 0) + num_bytes

    def end_round(self) -> None:
        """Take the peak of what was counted since the last round."""
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
    """Both directions."""

    def __init__(self, declared: Bandwidth | None = None) -> None:
        self._declared = declared
        self.upload, self.download = Meter(), Meter()

    def end_round(self) -> None:
        self.upload.end_round()
        self.download.end_round()

    @property
    def bandwidth(self) -> Bandwidth:
        return self._declared or Bandwidth(download=self.download.rate, upload=self.upload.rate)
