"""Chunks on disk while a state is being fetched: an interrupted download goes on where it was."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from collab_core.files import replace_file
from collab_core.tree import CHUNK_BYTES

HEAD = struct.Struct(">32sI")


class ChunkPool:
    """A file that chunks are added to. Whatever is in it is believed only if its hash is right.

    It is a memory for the case that we are interrupted, nothing more: if the disk is full, the download goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def open(self, wanted: Collection[bytes], take: Callable[[bytes, bytes], None]) -> None:
        """Hand over what an earlier download left of these chunks, and begin to add to it; the rest goes."""
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is empty
            self._take_up(set(wanted), take)
        with contextlib.suppress(OSError):
            self._file = open(self._path, "ab")  # noqa: SIM115 - see close

    def _take_up(self, wanted: set[bytes], take: Callable[[bytes, bytes], None]) -> None:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            kept: list[tuple[int, int]] = []
            for digest, start, end in _sound(data):
                if digest in wanted:
                    take(digest, data[start:end])
                    kept.append((start - HEAD.size, end))
            if sum(end - start for start, end in kept) < len(data):  # a torn end, or a state that has moved on
                replace_file(self._path, (data[start:end] for start, end in kept))

    def add(self, digest: bytes, chunk: bytes) -> None:
        """Keep a chunk that was checked."""
        if self._file is None:
            return
        try:
            self._file.write(HEAD.pack(digest, len(chunk)) + chunk)
            self._file.flush()
        except OSError:  # the disk is full; what is torn now is cut off next time
            self.close()

    def close(self) -> None:
        """What is in the file stays."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def clear(self) -> None:
        """Nobody needs these chunks any more."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _sound(data: mmap.mmap) -> Iterator[tuple[bytes, int, int]]:
    """Chunks that are what they were, and where they are; up to the first that is not."""
    position = 0
    while position + HEAD.size <= len(data):
        digest, size = HEAD.unpack_from(data, position)
        start, end = position + HEAD.size, position + HEAD.size + size
        if size > CHUNK_BYTES or end > len(data) or blake3(data[start:end]).digest() != digest:
            return
        yield digest, start, end
        position = end
