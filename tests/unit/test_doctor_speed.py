"""How fast a link is, told from messages that take their time."""

from __future__ import annotations

import asyncio

import pytest

from collab_core.swarm import speed
from collab_core.swarm.speed import MESSAGE_BYTES


class Line:
    """Carries so many bytes per second, however many messages are under way."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds = MESSAGE_BYTES / bytes_per_second
        self._is_free = asyncio.Lock()
        self.num_messages = 0

    async def move(self) -> int:
        async with self._is_free:
            await asyncio.sleep(self._seconds)
        self.num_messages += 1
        return MESSAGE_BYTES


@pytest.mark.parametrize("rate", [80_000.0, 300_000.0, 5_000_000.0])
def test_slow_links_are_measured_as_well_as_fast_ones(rate: float) -> None:
    async def scene() -> tuple[float, int]:
        line = Line(rate)
        return await speed._rate(line.move), line.num_messages

    found, num_messages = asyncio.run(scene())
    assert found == pytest.approx(rate, rel=0.2)
    assert (num_messages == 1) == (rate < 125_000), "who is slow is asked for no more than one"
