"""Parts on the wire: raw streams of the libp2p daemon, one frame per part.

hivemind's RPC streams wrap every part in a protobuf message: three copies each way and a task per message. A frame here
is a head of thirteen bytes and the payload as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon import P2P

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.link import Link
from collab_core.averaging.pipe import FOR_EVER, Line, Pipe

HEAD = struct.Struct(">BdI")

T = TypeVar("T")


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1  # opens a stream: the payload is the group's ID
    PART = 2  # a part of the sender's contribution
    END = 3  # nothing more comes
    AVERAGE = 4  # an averaged part
    REFUSED = 5  # you broke a rule: you get nothing more
    LOST = 6  # a part cannot be reduced any more
    NO_GROUP = 7  # there is no such group here


class BadFrame(Exception):
    """A frame of the wrong kind or size."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    weight: float = 0.0
    payload: bytearray = field(default_factory=bytearray)


class PartLine:
    """An open stream as a thread uses it, which waits for it in the kernel. Raises what a `Line` does."""

    def __init__(self, line: Line, buffers: Buffers) -> None:
        self._line, self._buffers = line, buffers

    def send(self, frame: Frame, timeout_s: float = FOR_EVER) -> None:
        self._line.send(memoryview(frame.payload), _head_of(frame), timeout_s)

    def receive(self, num_bytes: int, timeout_s: float) -> Frame | None:
        """As that of `PartStream`."""
        head = bytearray(HEAD.size)
        deadline = time.monotonic() + timeout_s
        try:
            self._line.fill(memoryview(head), timeout_s)
            frame = _opened(head, num_bytes, self._buffers)
            self._line.fill(memoryview(frame.payload), deadline - time.monotonic())
        except ConnectionError:
            return None
        return frame


class PartStream:
    """One open stream to another peer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, buffers: Buffers, link: Link
    ) -> None:
        self._pipe = Pipe(reader, writer, link.download.count, link.upload.count)
        self._buffers = buffers

    @classmethod
    async def open(cls, p2p: P2P, peer_id: str, name: str, buffers: Buffers, link: Link) -> PartStream:
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), name)
        return cls(reader, writer, buffers, link)

    async def in_thread(self, work: Callable[[PartLine], T]) -> T:
        """Let a thread send or receive, which is quicker where many bytes are to go or come; see `Pipe.in_thread`."""
        return await self._pipe.in_thread(lambda line: work(PartLine(line, self._buffers)))

    async def send(self, frame: Frame) -> None:
        await self._pipe.send(memoryview(frame.payload), _head_of(frame))

    async def receive(self, num_bytes: int) -> Frame | None:
        """The next frame, whose payload has `num_bytes` or is empty; None if the stream ended.

        Who is done with the payload gives it back to the buffers.

        Raises:
            BadFrame: the frame is of no known kind, or has another size; the stream is of no use any more.
        """
        head = bytearray(HEAD.size)
        try:
            await self._pipe.fill(memoryview(head))
            frame = _opened(head, num_bytes, self._buffers)
            await self._pipe.fill(memoryview(frame.payload))
        except ConnectionError:
            return None
        return frame

    async def finish(self, timeout_s: float) -> None:
        """Wait until the other side, which has everything then, has closed the stream.

        Whoever closes first makes its daemon reset the stream, and what is still on its way is lost. So the side that
        sent last never does, and within its time whatever still comes is thrown away.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pipe.ended(), timeout_s)

    def close(self) -> None:
        self._pipe.close()


def _head_of(frame: Frame) -> bytes:
    return HEAD.pack(frame.kind, frame.weight, len(frame.payload))


def _opened(head: bytearray, num_bytes: int, buffers: Buffers) -> Frame:
    """The frame of this head; its payload is yet to come."""
    kind, weight, size = HEAD.unpack(head)
    if kind not in Kind.__members__.values():
        raise BadFrame(f"a frame of the unknown kind {kind}")
    if size not in (0, num_bytes):
        raise BadFrame(f"{size} bytes instead of {num_bytes}")
    return Frame(Kind(kind), weight, buffers.payload(size))


Handler = Callable[[PartStream, str], Awaitable[None]]


async def serve_streams(p2p: P2P, name: str, buffers: Buffers, link: Link, handler: Handler) -> None:
    """Call `handler(stream, remote peer ID)` for every stream that others open under this name."""

    async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # whoever left is missed by those who wait for its parts
            stream = PartStream(reader, writer, buffers, link)
            with contextlib.closing(stream):
                await handler(stream, info.peer_id.to_base58())

    await p2p.add_binary_stream_handler(name, handle)
