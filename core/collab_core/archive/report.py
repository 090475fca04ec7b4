"""What an archive can tell about its versions, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from collab_core.archive.archive import Archive
from collab_core.archive.encoding import FLOATS, Kind
from collab_core.archive.version import Version
from collab_core.tree import StateTree, TensorEntry

Row = dict[str, Any]


def log(archive: Archive) -> list[Row]:
    """Every version, newest first."""
    tags: dict[str, list[str]] = {}
    for name, root in archive.tags().items():
        tags.setdefault(root, []).append(name)
    return [_row(archive, version, sorted(tags.get(version.root, []))) for version in reversed(archive.versions())]


def _row(archive: Archive, version: Version, tags: list[str]) -> Row:
    kinds, stored = set(), 0
    for entry in version.entries():
        if places := archive.store.places(entry.digest()):
            best = min(places, key=lambda place: place.item.size)
            kinds.add(best.item.kind)
            stored += best.item.size
    encoding = "delta" if Kind.DELTA in kinds else "planes" if Kind.PLANES in kinds else "raw"
    return {
        "ref": tags[0] if tags else version.root[:12] if version.epoch is None else f"epoch:{version.epoch}",
        "epoch": version.epoch,
        "root": version.root,
        "parent": version.parent,
        "level": version.level,
        "bytes": stored,
        "encoding": encoding,
        "loss": version.provenance.loss,
        "created": datetime.fromtimestamp(version.created, UTC).isoformat(timespec="seconds"),
        "tags": tags,
    }


def size(archive: Archive) -> Row:
    """What all versions take, and what they would take as they are."""
    versions = archive.versions()
    raw_bytes = sum(entry.num_bytes for version in versions for entry in version.all_entries())
    stored = sum(path.stat().st_size for path in archive.folder.rglob("*") if path.is_file())
    return {
        "versions": len(versions),
        "raw_bytes": raw_bytes,
        "stored_bytes": stored,
        "ratio": stored / raw_bytes if raw_bytes else None,
    }


def diff(archive: Archive, old: Version, new: Version) -> Row:
    """Which tensors differ, and by how much."""
    before = {entry.name: entry for entry in old.entries()}
    after = {entry.name: entry for entry in new.entries()}
    changed = [name for name in after if name in before and after[name].digest() != before[name].digest()]
    rows = [_difference(archive, before[name], after[name]) for name in changed]
    # only what an archive keeps ever moves: nothing of the optimizer
    known, wanted = (StateTree(tuple(version.all_entries())).chunk_sizes() for version in (old, new))
    squares = [(row["change"] ** 2, row["norm"] ** 2) for row in rows if row["norm"] is not None]
    change, norm = (math.sqrt(sum(column)) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return {
        "old": old.root,
        "new": new.root,
        "tensors": len(after),
        "changed": len(changed),
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "relative_update": change / norm if norm else None,
        "transfer_bytes": sum(size for chunk, size in wanted.items() if chunk not in known),
        "changes": rows,
    }


def _difference(archive: Archive, before: TensorEntry, after: TensorEntry) -> Row:
    row: Row = {"name": after.name, "dtype": after.dtype, "shape": list(after.shape), "norm": None, "change": None}
    if (before.dtype, before.shape) == (after.dtype, after.shape) and after.dtype in FLOATS:
        pairs = zip(_floats(archive, before), _floats(archive, after), strict=True)
        change = norm = 0.0
        for old, new in pairs:
            norm += float(np.square(new).sum())
            change += float(np.square(new - old).sum())
        row |= {"norm": math.sqrt(norm), "change": math.sqrt(change)}
    row["relative"] = row["change"] / row["norm"] if row["norm"] else None
    return row


def _floats(
    archive: Archive, entry: TensorEntry, block: int = 2**20
) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    """A tensor's values in double precision, some at a time."""
    data = archive.store.read(entry)
    if entry.dtype == "bfloat16":
        halves = np.frombuffer(data, "<u2")
        for start in range(0, len(halves), block):
            yield (halves[start : start + block].astype("<u4") << 16).view("<f4").astype(np.float64)
        return
    values = np.frombuffer(data, {"float64": "<f8", "float32": "<f4", "float16": "<f2"}[entry.dtype])
    for start in range(0, len(values), block):
        yield values[start : start + block].astype(np.float64)
