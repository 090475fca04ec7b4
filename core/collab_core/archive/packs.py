"""Packs: files that hold encoded tensors and, at their end, a table of what they hold.

A pack is written beside, synced and moved into place, and never changed afterwards. It is named by the hash of its
table, which has the hash of everything in it: whoever reads from a pack knows whether it reads what was written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
from blake3 import blake3

from collab_core.archive.encoding import Kind
from collab_core.files import Buffer, replace_file, sync_folder

MAGIC = b"collab pack 1\n"
TAIL = struct.Struct(">Q32s")  # size of the table, its hash
MAX_TABLE_BYTES = 2**26
SUFFIX = ".pack"


class BadPack(Exception):
    """A pack whose bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Item:
    """One encoded tensor in a pack."""

    tensor: bytes
    """Its identity: what it decodes to, whatever the encoding."""
    kind: Kind
    base: bytes | None
    """Of a difference: the tensor it is added to."""
    start: int
    size: int
    digest: bytes
    """Of the encoded bytes: nothing is decoded before they are known to be the right ones."""


@dataclass(frozen=True, slots=True)
class NewItem:
    """What is to be written."""

    tensor: bytes
    kind: Kind
    base: bytes | None
    pieces: Iterable[Buffer]


def write_pack(folder: Path, items: Iterable[NewItem]) -> tuple[str, list[Item]]:
    """Write a pack; its name and its table. The items are taken one by one, so they need not fit into memory."""
    beside = folder / f".new-{os.urandom(4).hex()}.tmp"
    table: list[Item] = []

    def content() -> Iterator[Buffer]:
        yield MAGIC
        start = len(MAGIC)
        for item in items:
            hasher, size = blake3(), 0
            for piece in item.pieces:
                hasher.update(piece)
                size += len(piece)
                yield piece
            table.append(Item(item.tensor, item.kind, item.base, start, size, hasher.digest()))
            start += size
        packed = _pack_table(table)
        yield packed
        yield TAIL.pack(len(packed), blake3(packed).digest())

    try:
        replace_file(beside, content())
        name = blake3(_pack_table(table)).hexdigest()
        os.replace(beside, folder / f"{name}{SUFFIX}")
        sync_folder(folder)
    finally:
        beside.unlink(missing_ok=True)
    return name, table


def read_table(path: Path) -> list[Item]:
    """What a pack holds.

    Raises:
        BadPack: it is damaged, or not a pack.
    """
    return parse_table(read_table_bytes(path), path.stem)


def read_table_bytes(path: Path) -> bytes:
    """The table of a pack as it is written there.

    Raises:
        BadPack: it is damaged, or not a pack.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL.size))
            length, digest = TAIL.unpack(file.read(TAIL.size))
            if length > min(size, MAX_TABLE_BYTES):
                raise BadPack("its table is cut off")
            file.seek(size - TAIL.size - length)
            packed = file.read(length)
    except (OSError, struct.error, ValueError) as error:
        raise BadPack(f"it cannot be read ({type(error).__name__})") from error
    if blake3(packed).digest() != digest:
        raise BadPack("its table is damaged")
    return packed


def begins_right(path: Path) -> bool:
    """Whether a file begins as a pack does. Nothing that is read depends on it, but somebody may have changed it."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parse_table(packed: bytes, name: str) -> list[Item]:
    """What the pack of this name holds, if that is its table.

    Raises:
        BadPack: it is not.
    """
    if blake3(packed).hexdigest() != name:
        raise BadPack("its table is damaged")
    try:
        return [_parse_item(*row) for row in msgpack.unpackb(packed)]
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # somebody wrote nonsense, with its right hash
        raise BadPack("its table makes no sense") from error


def _parse_item(tensor: bytes, kind: int, base: bytes | None, start: int, size: int, digest: bytes) -> Item:
    digests = (tensor, digest) if base is None else (tensor, digest, base)
    is_sound = (
        all(type(value) is bytes and len(value) == 32 for value in digests)
        and all(type(value) is int and 0 <= value < 2**63 for value in (start, size))
        and (base is not None) is (kind == Kind.DELTA)
    )
    if not is_sound:
        raise ValueError("not an item")
    return Item(tensor, Kind(kind), base, start, size, digest)


def read_item(path: Path, item: Item) -> memoryview:
    """The encoded bytes of one tensor.

    Raises:
        BadPack: they are not what was written.
    """
    try:
        with path.open("rb") as file:
            if item.start + item.size > os.fstat(file.fileno()).st_size:
                raise BadPack("its bytes are cut off")
            file.seek(item.start)
            data = file.read(item.size)
    except OSError as error:
        raise BadPack(f"it cannot be read ({error.strerror})") from error
    if blake3(data).digest() != item.digest:
        raise BadPack("its bytes are damaged")
    return memoryview(data)


def read_raw_into(path: Path, item: Item, target: memoryview) -> None:
    """The bytes of a tensor that is kept as it is. They are not checked here: whoever asks checks the tensor.

    Raises:
        BadPack: they cannot be read, or are not as many as they should be.
    """
    try:
        with path.open("rb") as file:
            file.seek(item.start)
            if item.size != len(target) or file.readinto(target) != item.size:
                raise BadPack("its bytes are cut off")
    except OSError as error:
        raise BadPack(f"it cannot be read ({error.strerror})") from error


def _pack_table(items: list[Item]) -> bytes:
    return bytes(msgpack.packb([[i.tensor, int(i.kind), i.base, i.start, i.size, i.digest] for i in items]))
