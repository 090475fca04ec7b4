"""A TCP proxy that delays what it passes on and, as on a bad line, sometimes holds it up.

The kernel's own tool for this (netem) is missing on many machines. A proxy sees a stream, not packets: to the programs
at its ends a lost packet is a pause until it was sent again, so that is what `loss` makes.

    python tests/lab/proxy.py --listen 0.0.0.0:4000 --to 45.83.7.10:31330 --delay-ms 50 --loss 0.01
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_BYTES = 16 * 1024
RETRANSMISSION_S = 0.2


@dataclass(frozen=True)
class Line:
    """What happens to bytes on their way, in each direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of chunks that have to be sent twice."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line, rng: random.Random) -> None:
    """Pass bytes on in order, each chunk `delay_s` after it came: a delay is no limit on the rate."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

    async def send() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - loop.time())
            if rng.random() < line.loss:
                await asyncio.sleep(RETRANSMISSION_S)
            if not data:
                return
            writer.write(data)
            await writer.drain()

    sending = asyncio.create_task(send())
    try:
        while True:
            data = await reader.read(CHUNK_BYTES)
            await queue.put((loop.time() + line.delay_s, data))
            if not data:
                break
        await sending
        if writer.can_write_eof():
            writer.write_eof()
    finally:
        sending.cancel()


async def serve(listen: tuple[str, int], to: tuple[str, int], line: Line, seed: int = 0) -> asyncio.Server:
    """Accept connections and carry each to its destination until one end closes it."""
    rng = random.Random(seed)

    async def connected(near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            far_reader, far = await asyncio.open_connection(*to)
        except OSError as error:
            print(f"no connection to {to}: {error}", file=sys.stderr)
            near.close()
            return
        try:
            await asyncio.gather(carry(near_reader, far, line, rng), carry(far_reader, near, line, rng))
        except OSError as error:
            print(f"a connection to {to} broke: {error}", file=sys.stderr)
        finally:
            near.close()
            far.close()

    return await asyncio.start_server(connected, *listen)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--listen", type=_place, required=True)
    parser.add_argument("--to", type=_place, required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    line = Line(options.delay_ms / 1e3, options.loss)
    server = await serve(options.listen, options.to, line, options.seed)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
