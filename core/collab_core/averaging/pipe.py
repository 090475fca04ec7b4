"""A socket that is read straight into memory we already have, and written straight from it.

What is long is left to a thread that waits in the kernel until all of it has come or gone. An event loop is woken for
every piece of it, and asyncio's streams copy each of them on its way: measured, that took as much of a core as the
arithmetic of a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial

LONG_BYTES = 2**16  # worth a thread
PIECE_BYTES = 2**20  # carried at once, then counted
DISCARDED_BYTES = 2**16

Count = Callable[[int, float], None]
"""Told how many bytes were carried, and within how many seconds; in any thread."""


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
        num_early = min(len(self._early), len(target))
        target[:num_early] = self._early[:num_early]
        target, self._early = target[num_early:], self._early[num_early:]
        if len(target) >= LONG_BYTES:
            await self._in_thread(_receive_all, target, self._on_received)
            return
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
                await self._in_thread(partial(_send_all, head), data, self._on_sent)
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

    async def _in_thread(
        self, carry: Callable[[socket.socket, memoryview, Count], None], data: memoryview, count: Count
    ) -> None:
        # a descriptor of the thread's own: when this pipe is closed, its number may soon be another socket's
        await self._loop.run_in_executor(None, carry, _dup(self._socket), data, count)

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


def _receive_all(own: socket.socket, target: memoryview, count: Count) -> None:
    with own:
        while target:
            start = time.monotonic()
            num_bytes = own.recv_into(target[:PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError
            count(num_bytes, time.monotonic() - start)
            target = target[num_bytes:]


def _send_all(head: bytes, own: socket.socket, data: memoryview, count: Count) -> None:
    with own:
        while data:
            start = time.monotonic()
            num_bytes = own.sendmsg([head, data[:PIECE_BYTES]])  # blocks until all of it has gone, or a signal comes
            count(num_bytes, time.monotonic() - start)
            head, data = head[num_bytes:], data[max(0, num_bytes - len(head)) :]
