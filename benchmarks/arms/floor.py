"""The floor: the bytes of one fp16 round through the same libp2p daemons, read and thrown away.

Every process sends every other its share of the vector and receives as much back, all at once, on raw streams of the
daemon. No codec, no protocol, no arithmetic, and no part waits for another.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from hivemind.p2p import PeerID

from benchmarks.arms.peer import open_swarm
from benchmarks.arms.tensors import measure_rounds
from benchmarks.averaging import NUM_VALUES
from benchmarks.team import Team

PIECE = bytes(2**18)
NAME = "floor"


async def send(writer: Any, num_bytes: int) -> None:
    for start in range(0, num_bytes, len(PIECE)):
        writer.write(memoryview(PIECE)[: min(len(PIECE), num_bytes - start)])
        await writer.drain()


async def receive(reader: Any, num_bytes: int) -> None:
    while num_bytes:
        received = await reader.read(min(num_bytes, 2**20))
        assert received, "the stream ended early"
        num_bytes -= len(received)


def main() -> None:
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    share = 2 * NUM_VALUES // team.size
    with open_swarm(team) as swarm:
        served: asyncio.Queue[None] = asyncio.Queue()

        async def serve(info: Any, reader: Any, writer: Any) -> None:
            await asyncio.gather(send(writer, share), receive(reader, share))
            await send(writer, 1)
            await reader.read()  # whoever closes first makes its daemon forget what is still on its way
            served.put_nowait(None)

        async def exchange() -> None:
            others = [PeerID.from_base58(team.hear("peer-id", rank)) for rank in range(team.size) if rank != team.rank]

            async def with_peer(peer_id: PeerID) -> None:
                _, reader, writer = await swarm.p2p.call_binary_stream_handler(peer_id, NAME)
                await asyncio.gather(send(writer, share), receive(reader, share + 1))
                writer.close()

            await asyncio.gather(*(with_peer(peer_id) for peer_id in others), *(served.get() for _ in others))

        swarm.reactor.run(swarm.p2p.add_binary_stream_handler(NAME, serve))
        team.tell("peer-id", swarm.peer_id)
        measure_rounds(team, lambda number: swarm.reactor.run(exchange()), list)


main()
