"""A socket that is read straight into memory we already have.

asyncio's StreamReader copies every byte three times on its way (measured: a fifth of the network thread's time in a
round). It still opens the connection; then a Pipe takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

DISCARDED_BYTES = 2**17  # at once


class Pipe(asyncio.BufferedProtocol):
    """Both directions of one connection. It reads only when somebody waits for bytes.

    Args:
        reader: what may already have received something.
        writer: whose transport is taken over.
        on_received: called with the size of whatever arrives.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_received: Callable[[int], None]
    ) -> None:
        self._writer, self._on_received = writer, on_received
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.pause_reading()
        self._early = memoryview(bytes(reader._buffer))  # type: ignore[attr-defined]
        self._target: memoryview | None = None
        self._filled: asyncio.Future[None] | None = None
        self._over, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        if reader._eof or self._transport.is_closing():  # type: ignore[attr-defined]
            self._over.set()
        self._transport.set_protocol(self)
        self._transport.set_write_buffer_limits(0)  # what was sent is out of our memory, which can be used again

    async def fill(self, target: memoryview) -> None:
        """Receive exactly as much as fits.

        Raises:
            ConnectionResetError: the stream ended before.
        """
        num_early = min(len(self._early), len(target))
        target[:num_early] = self._early[:num_early]
        target, self._early = target[num_early:], self._early[num_early:]
        if not target:
            return
        if self._over.is_set():
            raise ConnectionResetError
        self._target, self._filled = target, asyncio.get_running_loop().create_future()
        self._transport.resume_reading()
        try:
            await self._filled
        finally:
            self._transport.pause_reading()
            self._target = self._filled = None

    async def send(self, data: bytes | memoryview) -> None:
        """Returns when the socket has taken all of it.

        Raises:
            ConnectionResetError: nobody is there any more.
        """
        if not self._over.is_set():
            self._transport.write(data)
            await self._writable.wait()
        if self._over.is_set():
            raise ConnectionResetError

    async def ended(self) -> None:
        """Wait until the other side has closed the stream; what it still sends is thrown away."""
        self._transport.resume_reading()
        await self._over.wait()

    def close(self) -> None:
        if self._transport.get_write_buffer_size():  # nobody reads it, so closing would wait for ever
            self._transport.abort()
        self._writer.close()

    # --- called by the transport ---

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(DISCARDED_BYTES)) if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        self._on_received(nbytes)
        if self._target is None:
            return
        self._target = self._target[nbytes:]
        if not self._target:
            self._transport.pause_reading()
            if self._filled is not None and not self._filled.done():
                self._filled.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        self._over.set()
        self._writable.set()
        if self._filled is not None and not self._filled.done():
            self._filled.set_exception(ConnectionResetError())
