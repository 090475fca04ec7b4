"""The floor: the bytes of one fp16 round through the same libp2p daemons, read and thrown away.

Every process sends every other its share of the vector and receives as much back, all at once, on raw streams of the
daemon. No codec, no protocol, no arithmetic, and no part waits for another. Bytes are carried by asyncio's streams, as
hivemind hands them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import torch
from hivemind.p2p import PeerID

from benchmarks.arms.peer import open_swarm
from benchmarks.arms.tensors import measure_rounds
from benchmarks.averaging import NUM_VALUES
from benchmarks.team import Team

PIECE = bytes(2**18)
NAME = "floor"


class Carrier(Protocol):
    """One end of a stream."""

    async def send(self, num_bytes: int) -> None: ...

    async def receive(self, num_bytes: int) -> None: ...

    async def ended(self) -> None:
        """Wait until the other side has closed."""

    def close(self) -> None: ...


class Stream:
    """asyncio's."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, len(PIECE)):
            self._writer.write(memoryview(PIECE)[: min(len(PIECE), num_bytes - start)])
            await self._writer.drain()

    async def receive(self, num_bytes: int) -> None:
        while num_bytes:
            received = await self._reader.read(min(num_bytes, 2**20))
            assert received, "the stream ended early"
            num_bytes -= len(received)

    async def ended(self) -> None:
        await self._reader.read()

    def close(self) -> None:
        self._writer.close()


def measure(carrier: Callable[[Any, Any], Carrier]) -> None:
    """Rounds in which everybody sends and receives as much as in a round of fp16."""
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    share = 2 * NUM_VALUES // team.size
    with open_swarm(team) as swarm:
        served: asyncio.Queue[None] = asyncio.Queue()

        async def serve(info: Any, reader: Any, writer: Any) -> None:
            end = carrier(reader, writer)
            await asyncio.gather(end.send(share), end.receive(share))
            await end.send(1)
            await end.ended()  # whoever closes first makes its daemon forget what is still on its way
            end.close()
            served.put_nowait(None)

        async def exchange() -> None:
            others = [PeerID.from_base58(team.hear("peer-id", rank)) for rank in range(team.size) if rank != team.rank]

            async def with_peer(peer_id: PeerID) -> None:
                _, reader, writer = await swarm.p2p.call_binary_stream_handler(peer_id, NAME)
                end = carrier(reader, writer)
                await asyncio.gather(end.send(share), end.receive(share + 1))
                end.close()

            await asyncio.gather(*(with_peer(peer_id) for peer_id in others), *(served.get() for _ in others))

        swarm.reactor.run(swarm.p2p.add_binary_stream_handler(NAME, serve))
        team.tell("peer-id", swarm.peer_id)
        measure_rounds(team, lambda number: swarm.reactor.run(exchange()), list)


if __name__ == "__main__":
    measure(Stream)
