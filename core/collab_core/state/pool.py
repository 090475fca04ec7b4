"""Chunks on disk while a state is being fetched: an interrupted download goes on where it was."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from collab_core.tree import CHUNK_BYTES

HEAD = struct.Struct(">32sI")


class ChunkPool:
    """A file that chunks are added to. Whatever is in it is believed only if its hash is right.

    On a full disk, chunks stay in memory: the download goes on, and only a crash loses them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[bytes, tuple[int, int]] = {}
        self._in_memory: dict[bytes, bytes] = {}
        self._file: BinaryIO | None = None
        self._end = 0
        self._read()

    def _read(self) -> None:
        """Take up what an earlier download left; a torn end is cut off."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return
        position = 0
        while position + HEAD.size <= len(data):
            digest, size = HEAD.unpack_from(data, position)
            start = position + HEAD.size
            chunk = memoryview(data)[start : start + size]
            if size > CHUNK_BYTES or len(chunk) != size or blake3(chunk).digest() != digest:
                break
            self._places[digest] = (start, size)
            position = start + size
        self._end = position

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places or digest in self._in_memory

    def add(self, digest: bytes, chunk: bytes) -> None:
        """Keep a chunk that was checked."""
        try:
            if self._file is None:
                self._file = open(self._path, "r+b" if self._path.exists() else "w+b")  # noqa: SIM115 - see close
                self._file.truncate(self._end)
            self._file.seek(self._end)
            self._file.write(HEAD.pack(digest, len(chunk)))
            self._file.write(chunk)
            self._file.flush()
            self._places[digest] = (self._end + HEAD.size, len(chunk))
            self._end += HEAD.size + len(chunk)
        except OSError:
            self._in_memory[digest] = chunk

    def chunks(self) -> dict[bytes, memoryview]:
        """Everything there is, read from the disk as it is needed."""
        found = {digest: memoryview(chunk) for digest, chunk in self._in_memory.items()}
        if self._places:
            with self._path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            found |= {digest: content[start : start + size] for digest, (start, size) in self._places.items()}
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Nobody needs these chunks any more."""
        self.close()
        self._places, self._in_memory, self._end = {}, {}, 0
        with contextlib.suppress(OSError):
            os.unlink(self._path)
