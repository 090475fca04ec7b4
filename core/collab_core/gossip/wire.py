"""What two peers say to each other in a meeting: frames on a raw stream of the libp2p daemon.

asker                         asked
OFFER exchange, terms   →
                        ←     ACCEPT terms             or BUSY, or REFUSED why
VECTOR                  ⇄     VECTOR                   both at once
READY                   →                              "I hold the average and can take it"
                        ←     COMMITTED                or ABORTED

FETCH                   →                              a newcomer
                        ←     STATE epoch, VECTOR      or BUSY
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import struct
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgpack
import torch
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon import P2P
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collab_core.averaging.pipe import Pipe
from collab_core.gossip.journal import ID_BYTES
from collab_core.swarm.record import MAX_EPOCH

HEAD = struct.Struct(">BQ")
MAX_MESSAGE_BYTES = 1024
CONNECTING_S = 5.0  # somebody who just died is still in the directory
CLOSING_S = 3.0  # for the other side to close a stream that is done
SAYING_S = 30.0  # a few bytes; whoever takes none for so long does not read
GIVEN_BYTES = 256 * 1024  # at once, to a newcomer


class Kind(enum.IntEnum):
    """What a frame is."""

    OFFER = 1
    ACCEPT = 2
    BUSY = 3
    REFUSED = 4
    VECTOR = 5
    READY = 6
    COMMITTED = 7
    ABORTED = 8
    FETCH = 9
    STATE = 10


class BadFrame(Exception):
    """The other side says something that makes no sense here."""


class Message(BaseModel):
    """Strict: from somebody else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def pack(self) -> bytes:
        data: bytes = msgpack.packb(self.model_dump())
        return data


Epoch = Annotated[int, Field(ge=0, le=MAX_EPOCH)]


class Brought(Message):
    """What either side says of the model that it brings."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    epoch: Epoch | None
    """Its round; None from somebody who does not train any more, and stays in the round where it is."""


class Acceptance(Brought):
    """Yes."""


class Offer(Brought):
    """Shall we meet?"""

    exchange: Annotated[bytes, Field(min_length=ID_BYTES, max_length=ID_BYTES)]
    layout: Annotated[bytes, Field(max_length=64)]


class Refusal(Message):
    """Never, and why."""

    reason: Annotated[str, Field(max_length=200)]


class StateHead(Message):
    """What the vector that follows is."""

    epoch: Epoch


AnyMessage = TypeVar("AnyMessage", bound=Message)


def unpack(kind: type[AnyMessage], data: bytes | bytearray) -> AnyMessage:
    try:
        return kind.model_validate(msgpack.unpackb(data))
    except (ValidationError, ValueError, msgpack.UnpackException) as error:
        raise BadFrame(f"a {kind.__name__} that cannot be read") from error


class Wire:
    """One stream, from either end. Whoever waits gives a time; what is late is a `asyncio.TimeoutError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bytes_received = self.bytes_sent = 0
        self._pipe = Pipe(reader, writer, self._count_received, self._count_sent)

    @classmethod
    async def open(cls, p2p: P2P, peer_id: str, name: str) -> Wire:
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), name)
        return cls(reader, writer)

    def _count_received(self, num_bytes: int, seconds: float) -> None:
        self.bytes_received += num_bytes

    def _count_sent(self, num_bytes: int, seconds: float) -> None:
        self.bytes_sent += num_bytes

    async def say(self, kind: Kind, message: Message | None = None) -> None:
        data = b"" if message is None else message.pack()
        await asyncio.wait_for(self._pipe.send(memoryview(HEAD.pack(kind, len(data)) + data)), SAYING_S)

    async def send_vector(self, values: torch.Tensor, halfway: Callable[[], None] = lambda: None) -> None:
        data = values.contiguous().numpy().data.cast("B")
        await self._pipe.send(memoryview(HEAD.pack(Kind.VECTOR, len(data))))
        middle = len(data) // 2
        await self._pipe.send(data[:middle])
        halfway()
        await self._pipe.send(data[middle:])

    async def give_vector(self, values: torch.Tensor, toll: Callable[[int], Awaitable[None]]) -> None:
        """Send it piece by piece, no faster than the toll for so many bytes lets us."""
        data = values.contiguous().numpy().data.cast("B")
        await self._pipe.send(memoryview(HEAD.pack(Kind.VECTOR, len(data))))
        for start in range(0, len(data), GIVEN_BYTES):
            piece = data[start : start + GIVEN_BYTES]
            await toll(len(piece))
            await self._pipe.send(piece)

    async def hear(self, *expected: Kind, within_s: float) -> tuple[Kind, bytearray]:
        """The next frame, which is one of these.

        Raises:
            BadFrame: it is another one, or too long.
            ConnectionError: the stream ended.
        """
        return await asyncio.wait_for(self._hear(expected), within_s)

    async def _hear(self, expected: tuple[Kind, ...]) -> tuple[Kind, bytearray]:
        kind, size = await self._head()
        if kind not in expected:
            raise BadFrame(f"a frame of the kind {kind} instead of {' or '.join(one.name for one in expected)}")
        if size > MAX_MESSAGE_BYTES:
            raise BadFrame(f"a message of {size} bytes")
        data = bytearray(size)
        await self._pipe.fill(memoryview(data))
        return Kind(kind), data

    async def receive_vector(self, num_values: int, within_s: float) -> torch.Tensor:
        """Values of the right number; whether they are finite is for the caller to see."""
        return await asyncio.wait_for(self._receive_vector(num_values), within_s)

    async def _receive_vector(self, num_values: int) -> torch.Tensor:
        kind, size = await self._head()
        if kind != Kind.VECTOR:
            raise BadFrame(f"a frame of the kind {kind} instead of VECTOR")
        if size != 4 * num_values:
            raise BadFrame(f"{size} bytes instead of {4 * num_values}")
        values = torch.empty(num_values)
        await self._pipe.fill(values.numpy().data.cast("B"))
        return values

    async def _head(self) -> tuple[int, int]:
        head = bytearray(HEAD.size)
        await self._pipe.fill(memoryview(head))
        kind, size = HEAD.unpack(head)
        return kind, size

    async def finish(self, within_s: float) -> None:
        """Wait until the other side, which has everything then, closes; who sent last must not close first."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pipe.ended(), within_s)

    def close(self) -> None:
        self._pipe.close()


async def serve(p2p: P2P, name: str, handler: Callable[[Wire, str], Awaitable[None]]) -> None:
    """Call `handler(wire, remote peer ID)` for every stream that others open under this name."""

    async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            await handler(wire, info.peer_id.to_base58())
        finally:
            wire.close()

    await p2p.add_binary_stream_handler(name, handle)
