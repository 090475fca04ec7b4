"""How fast bytes go between us and one other peer: a short test that both sides can afford.

Rounds measure the link while they use it (`averaging.link`); this is for whoever wants to know before joining. A peer
gives and takes little per minute for it, and no faster than its volunteer allows (`--max-upload`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

NAMESPACE = "collab"
MESSAGE_BYTES = 256 * 1024
NUM_AT_ONCE = 4
TEST_S = 1.5
MAX_TEST_BYTES = 8 * 2**20  # in one direction; a faster link than this can tell apart is fast enough
MAX_MINUTE_BYTES = 256 * 2**20  # of all who ask, in both directions
CALL_TIMEOUT_S = 12.0  # a message takes that long at a sixth of a Mbit/s

Toll = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be sent; raises if that takes too long."""


class SpeedTest(ServicerBase):  # type: ignore[misc]
    """Takes bytes and gives bytes, to measure how long they take.

    Args:
        toll: what the volunteer's upload is limited by.
    """

    def __init__(self, toll: Toll) -> None:
        self._toll = toll
        self._minute, self._num_bytes = 0, 0

    async def listen(self, p2p: Any) -> None:
        await self.add_p2p_handlers(p2p, namespace=NAMESPACE)

    async def rpc_take(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Somebody measures its upload: we take it and say how much it was."""
        if not self._may(len(request.value)):
            return BytesValue()
        return BytesValue(value=len(request.value).to_bytes(4, "big"))

    async def rpc_give(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Somebody measures its download."""
        if not self._may(MESSAGE_BYTES):
            return BytesValue()
        await self._toll(MESSAGE_BYTES)
        return BytesValue(value=bytes(MESSAGE_BYTES))

    def _may(self, num_bytes: int) -> bool:
        minute = int(time.monotonic() / 60)
        if minute != self._minute:
            self._minute, self._num_bytes = minute, 0
        if num_bytes > MESSAGE_BYTES or self._num_bytes + num_bytes > MAX_MINUTE_BYTES:
            return False
        self._num_bytes += num_bytes
        return True


async def measure(p2p: Any, peer_id: str) -> tuple[float, float]:
    """Bytes per second down and up between us and a peer.

    Raises whatever the network does, and ConnectionError if the peer has given enough for now.
    """
    stub = SpeedTest.get_stub(p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)
    outgoing = BytesValue(value=bytes(MESSAGE_BYTES))

    async def give() -> int:
        return len((await stub.rpc_give(BytesValue(), timeout=CALL_TIMEOUT_S)).value)

    async def take() -> int:
        return int.from_bytes((await stub.rpc_take(outgoing, timeout=CALL_TIMEOUT_S)).value, "big")

    return await _rate(give), await _rate(take)


async def _rate(move: Callable[[], Awaitable[int]]) -> float:
    """Of a direction, over some messages at once: one after the other would measure the distance, not the width."""
    start = time.monotonic()
    if await move() != MESSAGE_BYTES:
        raise ConnectionError("the peer has given enough for now")
    first_s = time.monotonic() - start
    if first_s > TEST_S:  # a link this slow has nothing to gain from several at once
        return MESSAGE_BYTES / first_s
    # the first one also woke the connection up, and does not count
    start, total = time.monotonic(), 0

    async def keep_moving() -> None:
        nonlocal total
        while time.monotonic() < start + TEST_S and total < MAX_TEST_BYTES:
            moved = await move()
            if not moved:
                return
            total += moved

    await asyncio.gather(*(keep_moving() for _ in range(NUM_AT_ONCE)))
    if not total:
        raise ConnectionError("the peer has given enough for now")
    return total / (time.monotonic() - start)
