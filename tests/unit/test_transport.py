"""What hivemind leaves open is closed."""

from __future__ import annotations

import asyncio
import gc
import socket

from collab_core.swarm.transport import close_when_dropped


class OldWriter(asyncio.StreamWriter):
    """As of Python 3.11.4."""


def test_a_writer_that_is_dropped_closes_its_socket() -> None:
    async def scene() -> bytes:
        close_when_dropped(OldWriter)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        dropped = OldWriter(writer.transport, writer._protocol, reader, asyncio.get_running_loop())  # type: ignore[attr-defined]
        del dropped
        gc.collect()
        theirs.settimeout(5)
        return await asyncio.to_thread(theirs.recv, 1)

    assert asyncio.run(scene()) == b""
