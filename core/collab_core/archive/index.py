"""Where every encoded tensor is: an SQLite table, which is only a memory of what the packs say about themselves.

It is never believed without proof: what it leads to has a hash. If it is damaged, or misses a pack, it is made anew; so
nothing waits until it is safe on the disk.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from collab_core.archive.encoding import Kind
from collab_core.archive.packs import SUFFIX, BadPack, Item, read_table

SCHEMA = """
PRAGMA synchronous = OFF;
PRAGMA journal_mode = MEMORY;
CREATE TABLE IF NOT EXISTS packs (name TEXT PRIMARY KEY, size INTEGER NOT NULL, fault TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS items (
    tensor BLOB NOT NULL, kind INTEGER NOT NULL, base BLOB, start INTEGER NOT NULL, size INTEGER NOT NULL,
    digest BLOB NOT NULL, pack TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS items_by_tensor ON items (tensor);
CREATE INDEX IF NOT EXISTS items_by_base ON items (base);
CREATE INDEX IF NOT EXISTS items_by_pack ON items (pack);
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One encoding of a tensor, and the pack it is in."""

    item: Item
    pack: str


class Index:
    """Opens, or makes, the index of a folder of packs."""

    def __init__(self, path: Path, packs: Path) -> None:
        self._path, self._packs = path, packs
        try:
            self._database = self._open()
            self.refresh()
        except sqlite3.Error:
            self.rebuild()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        database.executescript(SCHEMA)
        return database

    def rebuild(self) -> None:
        """Forget everything and ask the packs again."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._database.close()
        for suffix in ("", "-journal", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._database = self._open()
        self.refresh()

    def refresh(self) -> None:
        """Take in packs that came, forget those that went."""
        known = dict(self._database.execute("SELECT name, size FROM packs"))
        present = {path.stem: path.stat().st_size for path in self._packs.glob(f"*{SUFFIX}")}
        for name in known.keys() - present.keys():
            self.forget(name)
        for name, size in present.items():
            if known.get(name) != size:
                self.forget(name)
                self._read(name, size)

    def _read(self, name: str, size: int) -> None:
        try:
            items, fault = read_table(self._packs / f"{name}{SUFFIX}"), ""
        except BadPack as error:
            items, fault = [], str(error)
        self.add(name, size, items, fault)

    def add(self, name: str, size: int, items: Iterable[Item], fault: str = "") -> None:
        """Take in a pack that is on disk."""
        with self._transaction():
            self._database.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?)", (name, size, fault))
            self._database.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((i.tensor, int(i.kind), i.base, i.start, i.size, i.digest, name) for i in items),
            )

    def forget(self, name: str) -> None:
        with self._transaction():
            self._database.execute("DELETE FROM packs WHERE name = ?", (name,))
            self._database.execute("DELETE FROM items WHERE pack = ?", (name,))

    def places(self, tensor: bytes) -> list[Place]:
        """Every encoding of a tensor."""
        return self._select("WHERE tensor = ?", tensor)

    def based_on(self, tensor: bytes) -> list[Place]:
        """Every difference to a tensor."""
        return self._select("WHERE base = ?", tensor)

    def places_in(self, pack: str) -> list[Place]:
        """Everything in a pack."""
        return self._select("WHERE pack = ?", pack)

    def all_places(self) -> list[Place]:
        return self._select("")

    def _select(self, condition: str, *values: bytes | str) -> list[Place]:
        columns = "tensor, kind, base, start, size, digest, pack"
        rows = self._database.execute(f"SELECT {columns} FROM items {condition}", values)
        return [Place(Item(row[0], Kind(row[1]), *row[2:6]), row[6]) for row in rows]

    def faults(self) -> dict[str, str]:
        """Damaged packs, with what is wrong."""
        return dict(self._database.execute("SELECT name, fault FROM packs WHERE fault != ''"))

    def sizes(self) -> dict[str, int]:
        return dict(self._database.execute("SELECT name, size FROM packs"))

    @contextlib.contextmanager
    def _transaction(self):  # type: ignore[no-untyped-def]
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def close(self) -> None:
        self._database.close()
