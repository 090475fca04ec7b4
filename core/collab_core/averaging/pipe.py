"""A socket that is read straight into memory we already have, and written straight from it.

What is long is left to a thread that waits in the kernel until all of it has come or gone. An event loop is woken for
every piece of it, and asyncio's streams copy each of them on its way: measured, that took as much of a core as the
arithmetic of a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

LONG_BYTES = 2**16  # worth a thread
PIECE_BYTES = 2**20  # carried at once, then counted
DISCARDED_BYTES = 2**16
FOR_EVER = math.inf
TIMEVAL = struct.Struct("@ll")

T = TypeVar("T")

Count = Callable[[int, float], None]
"""Told how many bytes were carried, and within how many seconds; in any thread."""


class Line:
    """A connection as a thread uses it, which waits in the kernel.

    Raises:
        ConnectionError: from every method, once the pipe is closed or the other side has left.
        TimeoutError: what was to come or to go was not through in time.
    """

    def __init__(
        self,
        own: socket.socket,
        take_early: Callable[[memoryview], memoryview],
        on_received: Count,
        on_sent: Count,
    ) -> None:
        self._socket, self._take_early = own, take_early
        self._on_received, self._on_sent = on_received, on_sent

    def do(self, work: Callable[[Line], T]) -> T:
        with self._socket:
            return work(self)

    def fill(self, target: memoryview, timeout_s: float = FOR_EVER) -> None:
        """Receive exactly as much as fits."""
        target = self._take_early(target)
        deadline = time.monotonic() + timeout_s
        while target:
            start = time.monotonic()
            self._limit(socket.SO_RCVTIMEO, deadline - start)
            with _no_timeout_is_no_data():
                num_bytes = self._socket.recv_into(target[:PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError
            self._on_received(num_bytes, time.monotonic() - start)
            target = target[num_bytes:]

    def send(self, data: memoryview, head: bytes = b"", timeout_s: float = FOR_EVER) -> None:
        """Returns when the socket has taken all of it; the head goes first, in one piece with the data."""
        deadline = time.monotonic() + timeout_s
        while head or data:
            start = time.monotonic()
            self._limit(socket.SO_SNDTIMEO, deadline - start)
            with _no_timeout_is_no_data():
                num_bytes = self._socket.sendmsg([head, data[:PIECE_BYTES]])
            self._on_sent(num_bytes, time.monotonic() - start)
            head, data = head[num_bytes:], data[max(0, num_bytes - len(head)) :]

    def _limit(self, option: int, seconds: float) -> None:
        """How long the kernel waits; of both directions each has its own."""
        if seconds <= 0:
            raise TimeoutError
        parts = (0, 0) if seconds == FOR_EVER else (int(seconds), max(1, int(seconds % 1 * 1e6)))  # zero is for ever
        self._socket.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(*parts))


class Pipe:
    """Both directions of one connection. It reads only when somebody waits for bytes.

    One may read while one writes. The loop's own executor needs room for all pipes at once: one that waits for a
    thread makes somebody else wait.

    Args:
        reader: what may already have received something.
        writer: whose socket is taken over.
        on_received: of whatever arrives.
        on_sent: of whatever goes.

    Raises:
        ConnectionError: it has ended already.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_received: Count, on_sent: Count
    ) -> None:
        self._on_received, self._on_sent = on_received, on_sent
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._early = memoryview(bytes(reader._buffer))  # type: ignore[attr-defined]
        self._socket = _dup(writer.get_extra_info("socket"))
        self._socket.setblocking(True)
        writer.transport.abort()  # which has a descriptor of its own

    async def fill(self, target: memoryview) -> None:
        """Receive exactly as much as fits.

        Raises:
            ConnectionError: the stream ended before.
        """
        if len(target) >= LONG_BYTES:
            await self.in_thread(lambda line: line.fill(target))
            return
        target = self._take_early(target)
        while target:
            num_bytes = await self._receive(target)
            if not num_bytes:
                raise ConnectionResetError
            target = target[num_bytes:]

    async def send(self, data: memoryview, head: bytes = b"") -> None:
        """Returns when the socket has taken all of it.

        Args:
            head: goes before the data, in one piece with it: the daemon would seal and send a few bytes by themselves.

        Raises:
            ConnectionError: nobody is there any more.
        """
        if len(data) >= LONG_BYTES:
            try:
                await self.in_thread(lambda line: line.send(data, head))
            except asyncio.CancelledError:
                self.close()  # the thread still reads the memory, which its owner may now change
                raise
            return
        left = memoryview(head + data)
        while left:
            left = left[await self._send(left) :]

    async def ended(self) -> None:
        """Wait until the other side has closed the stream; what it still sends is thrown away."""
        target = memoryview(bytearray(DISCARDED_BYTES))
        with contextlib.suppress(ConnectionError):
            while await self._receive(target):
                await asyncio.sleep(0)  # somebody may never stop

    def close(self) -> None:
        """Whoever waits, here or in a thread, gets a ConnectionError."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for ready in self._waiting.values():
            if not ready.done():
                ready.set_exception(ConnectionResetError())

    async def in_thread(self, work: Callable[[Line], T]) -> T:
        """Let a thread use the connection, until the work is done or raises.

        If this is cancelled, the work goes on until it next waits for the connection after that was closed.
        """
        # a descriptor of the thread's own: when this pipe is closed, its number may soon be another socket's
        line = Line(_dup(self._socket), self._take_early, self._on_received, self._on_sent)
        return await self._loop.run_in_executor(None, line.do, work)

    def _take_early(self, target: memoryview) -> memoryview:
        """Begin with what came before the socket was taken over; returns what is left to fill."""
        num_bytes = min(len(self._early), len(target))
        target[:num_bytes], self._early = self._early[:num_bytes], self._early[num_bytes:]
        return target[num_bytes:]

    async def _receive(self, target: memoryview) -> int:
        """Whatever is there; if nothing is, wait for something. 0 is the end."""
        while self._socket.fileno() >= 0:
            try:
                num_bytes = self._socket.recv_into(target, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._until_ready("read", self._loop.add_reader, self._loop.remove_reader)
            else:
                self._on_received(num_bytes, 0.0)
                return num_bytes
        raise ConnectionResetError

    async def _send(self, data: memoryview) -> int:
        while self._socket.fileno() >= 0:
            try:
                num_bytes = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._until_ready("write", self._loop.add_writer, self._loop.remove_writer)
            else:
                self._on_sent(num_bytes, 0.0)
                return num_bytes
        raise ConnectionResetError

    async def _until_ready(self, direction: str, add: Callable[..., None], remove: Callable[..., object]) -> None:
        ready = self._waiting[direction] = self._loop.create_future()
        add(self._socket, _wake, ready)
        try:
            await ready
        finally:
            if self._waiting.get(direction) is ready:  # otherwise somebody else waits by now
                del self._waiting[direction]
                if self._socket.fileno() >= 0:
                    remove(self._socket)


def _dup(original: socket.socket) -> socket.socket:
    try:
        return original.dup()
    except OSError as error:  # closed, or no descriptor is left
        raise ConnectionResetError(str(error)) from error


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


@contextlib.contextmanager
def _no_timeout_is_no_data() -> Iterator[None]:
    """A blocking socket says so if its time is up."""
    try:
        yield
    except BlockingIOError:
        raise TimeoutError from None
