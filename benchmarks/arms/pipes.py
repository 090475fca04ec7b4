"""The floor once more, its bytes carried as our rounds carry theirs: what is left above it is ours to answer for."""

from __future__ import annotations

from typing import Any

from benchmarks.arms.floor import measure
from collab_core.averaging.pipe import Pipe

PIECE_BYTES = 2**21  # as a round's parts


class Piped:
    """One of our pipes, filled from and emptied into the same memory again and again."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._pipe = Pipe(reader, writer, _ignore, _ignore)
        self._sent, self._received = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(PIECE_BYTES))

    async def send(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            await self._pipe.send(self._sent[: num_bytes - start])

    async def receive(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            await self._pipe.fill(self._received[: num_bytes - start])

    async def ended(self) -> None:
        await self._pipe.ended()

    def close(self) -> None:
        self._pipe.close()


def _ignore(num_bytes: int, seconds: float) -> None:
    """Nobody asks how fast it was."""


if __name__ == "__main__":
    measure(Piped)
