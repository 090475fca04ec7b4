"""Rounds without a network: several peers of one process, each with its own side of a real all-reduce.

Everything a round computes is the product's: who reduces what, the codec, the error feedback of sender and reducer, the
frames. Only the daemons are missing: a pair of sockets stands for the stream between two peers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import torch

from collab_core.averaging.group import GROUP_ID_BYTES, Member, close_group
from collab_core.averaging.link import Bandwidth, Link
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.toolbox import Toolbox
from collab_core.averaging.wire import PartStream
from collab_core.run.settings import RunSettings
from collab_core.swarm.reactor import Reactor

TIMEOUT_S = 60.0


class Table:
    """Peers that sit around one table.

    Args:
        settings: of the run.
        lengths: of the vectors that are averaged, in turn.
        peer_ids: of everyone; which of them comes first decides who reduces what.
    """

    def __init__(self, settings: RunSettings, lengths: Sequence[int], peer_ids: Sequence[str]) -> None:
        self._settings, self._peer_ids = settings, tuple(peer_ids)
        self._boxes = [Toolbox(settings, lengths) for _ in peer_ids]
        self._link = Link(Bandwidth())
        self._reactor = Reactor()
        self.bytes_sent = 0
        """By all together, in all rounds: payloads, as peers report them."""

    def round(self, epoch: int, contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> list[torch.Tensor]:
        """Everyone's average."""
        return self._reactor.run(self._round(epoch, contributions, weights))

    def close(self) -> None:
        self._reactor.close()
        for box in self._boxes:
            box.thread.shutdown()

    async def _round(
        self, epoch: int, contributions: Sequence[torch.Tensor], weights: Sequence[float]
    ) -> list[torch.Tensor]:
        members = [
            Member(
                peer_id=peer_id,
                epoch=epoch,
                weight=weight,
                norm=box.norm(epoch, contribution, weight),
                can_reduce=True,
            )
            for peer_id, box, contribution, weight in zip(
                self._peer_ids, self._boxes, contributions, weights, strict=True
            )
        ]
        group = close_group(b"", self._peer_ids[0], members)
        sides: dict[str, Reduction] = {}
        serving: list[asyncio.Task[None]] = []
        tools = [box.tools(epoch) for box in self._boxes]
        for index, me in enumerate(self._peer_ids):
            sides[me] = Reduction(
                me=me,
                group=group,
                contribution=contributions[index],
                num_values=self._boxes[index].num_values(epoch),
                epoch=epoch,
                tools=tools[index],
                weight_cap=float(self._settings.limits.max_samples_per_peer),
                timeout_s=TIMEOUT_S,
                patience_s=TIMEOUT_S,
                connect=lambda to, me=me: self._connect(me, to, sides, serving),  # type: ignore[misc]
                is_gone=lambda peer_id: False,
                on_refused=_refused,
                fail_at=None,
            )
        averages = await asyncio.gather(*(side.run() for side in sides.values()))
        await asyncio.gather(*serving)
        for side, used in zip(sides.values(), tools, strict=True):
            used.feedback.commit()
            await side.drain()
            self.bytes_sent += side.bytes_sent
        return averages

    async def _connect(
        self, me: str, to: str, sides: dict[str, Reduction], serving: list[asyncio.Task[None]]
    ) -> PartStream:
        mine, other = socket.socketpair()
        streams = []
        for end, peer_id in ((mine, me), (other, to)):
            reader, writer = await asyncio.open_connection(sock=end)
            streams.append(PartStream(reader, writer, self._boxes[self._peer_ids.index(peer_id)].buffers, self._link))
        serving.append(asyncio.create_task(_serve(streams[1], sides[to], me)))
        return streams[0]

    def give_back(self, averages: Sequence[torch.Tensor]) -> None:
        """Nobody looks at these averages any more."""
        for box, average in zip(self._boxes, averages, strict=True):
            box.buffers.give_back_vector(average)


async def _serve(stream: PartStream, side: Reduction, sender: str) -> None:
    """As a daemon's handler does."""
    try:
        hello = await stream.receive(GROUP_ID_BYTES)
        assert hello is not None
        assert bytes(hello.payload) == side.group.group_id
        await side.serve(stream, sender)
    finally:
        stream.close()


def _refused(peer_id: str, reason: str, is_lie: bool) -> None:
    raise AssertionError(f"{peer_id} was refused: {reason}")
