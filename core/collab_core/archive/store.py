"""Tensors on disk by their identity: written once, read along a chain of differences, checked at the end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from collab_core.archive.encoding import BadEncoding, Kind, decode_into, encode, new_memory
from collab_core.archive.index import Index, Place
from collab_core.archive.packs import SUFFIX, BadPack, NewItem, read_item, read_raw_into, write_pack
from collab_core.archive.ways import ways_to
from collab_core.errors import ArchiveError, Code
from collab_core.tree import RawTensor, TensorEntry

MAX_WAYS = 64  # to one tensor that are tried


class Damaged(ArchiveError):
    """A tensor of which no encoding leads to the right bytes."""

    def __init__(self, why: str) -> None:
        super().__init__(
            Code.DAMAGED_VERSION,
            f"A tensor in the archive cannot be read: {why}.",
            fix="`collab models verify` shows what is damaged. `collab models pull` gets it from another archive.",
        )
        self.why = why


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in memory, and which one it is."""

    tensor: bytes
    data: memoryview


class Store:
    """The packs of an archive and their index."""

    def __init__(self, folder: Path) -> None:
        self._packs = folder / "packs"
        self._packs.mkdir(parents=True, exist_ok=True)
        self.index = Index(folder / "index.sqlite", self._packs)

    def path(self, pack: str) -> Path:
        return self._packs / f"{pack}{SUFFIX}"

    def packs(self) -> set[str]:
        """All that are on the disk."""
        return {path.stem for path in self._packs.glob(f"*{SUFFIX}")}

    def places(self, tensor: bytes) -> list[Place]:
        """Every encoding of a tensor. An index that cannot answer is made anew."""
        try:
            return self.index.places(tensor)
        except (sqlite3.Error, ValueError, TypeError):
            self.index.rebuild()
            return self.index.places(tensor)

    def has(self, tensor: bytes) -> bool:
        return next(self.chains(tensor), None) is not None

    def read(self, entry: TensorEntry, held: Held | None = None) -> memoryview:
        """A tensor's bytes, proven to be the right ones.

        Args:
            entry: which one.
            held: another tensor in memory. If the wanted one is a difference to it, the chain is not walked again, and
                its memory becomes the wanted tensor's.

        Raises:
            Damaged: there is no way to it.
        """
        tensor = entry.digest()
        faults: list[str] = []
        for is_second_try in (False, True):
            if is_second_try:  # perhaps only the index is wrong, or a pack was replaced while we read
                self.index.rebuild()
            for chain in self._chains(tensor, held):
                try:
                    return self.decode(entry, chain, held)
                except (BadPack, BadEncoding) as error:
                    if held is not None:  # its memory may be half changed
                        return self.read(entry)
                    faults.append(str(error))
        raise Damaged(faults[0] if faults else "it is in no pack")

    def chains(self, tensor: bytes) -> Iterator[list[Place]]:
        """Ways to a tensor, short ones first."""
        return self._chains(tensor, None)

    def _chains(self, tensor: bytes, held: Held | None) -> Iterator[list[Place]]:
        return islice(ways_to(tensor, self.places, held.tensor if held is not None else None), MAX_WAYS)

    def decode(self, entry: TensorEntry, chain: list[Place], held: Held | None) -> memoryview:
        """A tensor along one way to it; the memory of what is held becomes its own.

        Raises:
            BadPack, BadEncoding: it does not lead there.
        """
        starts_whole = bool(chain) and chain[0].item.kind is not Kind.DELTA
        data = new_memory(entry.num_bytes) if starts_whole or held is None else held.data
        if chain and chain[0].item.kind is Kind.RAW:
            read_raw_into(self.path(chain[0].pack), chain[0].item, data)
            chain = chain[1:]
        steps = ((place.item.kind, read_item(self.path(place.pack), place.item)) for place in chain)
        decode_into(entry.dtype, data, steps)
        if TensorEntry.of("", RawTensor(entry.dtype, entry.shape, data)).digest() != entry.digest():
            raise BadEncoding("it does not decode to the right bytes")
        return data

    def write(self, items: Iterable[NewItem]) -> list[Place]:
        """Put tensors into a new pack; nothing is written if there are none."""
        listed = iter(items)
        first = next(listed, None)
        if first is None:
            return []
        name, table = write_pack(self._packs, (item for part in ([first], listed) for item in part))
        self.index.add(name, self.path(name).stat().st_size, table)
        return [Place(item, name) for item in table]

    def drop(self, pack: str) -> None:
        """Delete a pack."""
        self.path(pack).unlink(missing_ok=True)
        self.index.forget(pack)

    def close(self) -> None:
        self.index.close()


def whole(tensor: bytes, raw: RawTensor, kind: Kind) -> NewItem:
    """A tensor that needs no other."""
    return NewItem(tensor, kind, None, encode(kind, raw.dtype, raw.data))
