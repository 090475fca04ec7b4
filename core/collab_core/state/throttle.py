"""Giving away no more per second than the volunteer allows."""

from __future__ import annotations

import asyncio


class Throttle:
    """A queue that moves at a given speed."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        """0: as fast as it goes."""
        self._free_at = 0.0

    async def pass_through(self, num_bytes: int) -> None:
        """Wait until so much may be sent."""
        if self.bytes_per_second <= 0:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free_at)
        self._free_at = start + num_bytes / self.bytes_per_second
        await asyncio.sleep(start - now)
