"""Giving away no more per second than the volunteer allows."""

from __future__ import annotations

import asyncio

MAX_WAIT_S = 10.0  # whoever would wait longer is told so, and may ask somebody else meanwhile


class Busy(Exception):
    """There is a queue already."""


class Throttle:
    """A queue that moves at a given speed."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        """0: as fast as it goes."""
        self._free_at = 0.0

    async def pass_through(self, num_bytes: int) -> None:
        """Wait until so much may have been sent: what goes out never runs ahead of the limit."""
        if self.bytes_per_second <= 0:
            return
        now = asyncio.get_running_loop().time()
        start, cost_s = max(now, self._free_at), num_bytes / self.bytes_per_second
        if start - now > MAX_WAIT_S:
            raise Busy("too many want something")
        self._free_at = start + cost_s
        try:
            await asyncio.sleep(self._free_at - now)
        except asyncio.CancelledError:  # whoever waited has gone
            self._free_at -= cost_s
            raise
