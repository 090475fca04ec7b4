"""Files appear whole or not at all: written beside, synced, then moved into place."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

Buffer = bytes | memoryview

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,16}){0,3}")


def is_plain_name(name: str) -> bool:
    """Whether somebody else's file may have this name here: no folders, nothing hidden, nothing Windows minds."""
    return _NAME.fullmatch(name) is not None


def replace_file(path: Path, data: Buffer | Iterable[Buffer], *, mode: int = 0o666) -> None:
    """Put `data` at `path`, replacing what is there. A crash or a full disk leaves the old file as it was."""
    with _written_beside(path, data, mode) as beside:
        os.replace(beside, path)


def create_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Put `data` at `path`, which must not exist yet.

    Raises:
        FileExistsError: something is there already; it is left as it was.
    """
    with _written_beside(path, data, mode) as beside:
        try:
            os.link(beside, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links here (FAT, a Drive mounted in a notebook): check, then rename
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(beside, path)


@contextlib.contextmanager
def _written_beside(path: Path, data: Buffer | Iterable[Buffer], mode: int) -> Iterator[Path]:
    """A synced file with its final mode in the same folder; gone afterwards unless it was moved."""
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for piece in [data] if isinstance(data, bytes | memoryview) else data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield beside
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The rename itself must survive a power cut; some filesystems cannot sync a folder, and that is no failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
