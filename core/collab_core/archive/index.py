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


LOCKED_S = 60.0  # another process writes to it; that takes milliseconds


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
            self._begin_anew()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=LOCKED_S)
        database.executescript(SCHEMA)
        self._inode = self._path.stat().st_ino
        return database

    def _begin_anew(self) -> None:
        """The file is damaged: away with it."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._database.close()
        for suffix in ("", "-journal", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._database = self._open()
        self.refresh()

    def renew(self) -> None:
        """See what other processes did. The file itself may be another one by now."""
        try:
            if not self._path.exists() or self._path.stat().st_ino != self._inode:
                self._database.close()
                self._database = self._open()
            self.refresh()
        except sqlite3.Error:
            self._begin_anew()

    def rebuild(self) -> None:
        """Forget everything and ask the packs again. Others see what was there before, or all of it."""
        tables = {name: (size, *self._table(name)) for name, size in self._present().items()}
        try:
            with self._transaction():
                self._database.execute("DELETE FROM packs")
                self._database.execute("DELETE FROM items")
                for name, (size, items, fault) in tables.items():
                    self._insert(name, size, items, fault)
        except sqlite3.Error:
            self._begin_anew()

    def refresh(self) -> None:
        """Take in packs that came, forget those that went."""
        known, present = self.sizes(), self._present()
        for name in known.keys() - present.keys():
            self.forget(name)
        for name, size in present.items():
            if known.get(name) != size:
                self.add(name, size, *self._table(name))

    def check(self, name: str) -> bool:
        """Whether we remember of a pack what it says itself. If not, we do from now on.

        Nothing is deleted on the word of an index alone: after a power cut it may know of a pack and of nothing in it.
        """
        items, fault = self._table(name)
        try:
            is_right = not fault and {place.item for place in self.places_in(name)} == set(items)
        except (ValueError, TypeError):  # rows that make no sense
            is_right = False
        if not is_right and name in (present := self._present()):
            self.add(name, present[name], items, fault)
        return is_right

    def _present(self) -> dict[str, int]:
        present = {}
        for path in self._packs.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process deletes it just now
                present[path.stem] = path.stat().st_size
        return present

    def _table(self, name: str) -> tuple[list[Item], str]:
        try:
            return read_table(self._packs / f"{name}{SUFFIX}"), ""
        except BadPack as error:
            return [], str(error)

    def add(self, name: str, size: int, items: Iterable[Item], fault: str = "") -> None:
        """Take in a pack, in place of what was known of it."""
        with self._transaction():
            self._delete(name)
            self._insert(name, size, items, fault)

    def forget(self, name: str) -> None:
        with self._transaction():
            self._delete(name)

    def _insert(self, name: str, size: int, items: Iterable[Item], fault: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?)", (name, size, fault))
        self._database.executemany(
            "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((i.tensor, int(i.kind), i.base, i.start, i.size, i.digest, name) for i in items),
        )

    def _delete(self, name: str) -> None:
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
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def close(self) -> None:
        self._database.close()
