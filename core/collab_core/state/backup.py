"""The state on disk: replaced atomically, believed only if its root is right."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgpack
import torch

from collab_core.errors import Code, StateError
from collab_core.files import replace_file
from collab_core.state.snapshot import Snapshot
from collab_core.state.tensors import raw, tensor_from, tree_of
from collab_core.tree import BadTree, StateTree, is_root

MAGIC = b"collab state 1\n"


@dataclass(frozen=True, slots=True)
class Backup:
    """A state read back, with what the peer knew about it."""

    tensors: dict[str, torch.Tensor]
    root: str
    history: dict[int, str]
    """Roots of earlier epochs."""
    counters: dict[str, int]
    """The peer's own notes, such as its contribution."""


def write_backup(
    path: Path, run_id: str, snapshot: Snapshot, history: Mapping[int, str], counters: Mapping[str, int]
) -> None:
    """Write a snapshot beside the old backup, then put it in its place."""
    header = msgpack.packb(
        {
            "run_id": run_id,
            "root": snapshot.root,
            "tree": snapshot.tree.to_bytes(),
            "history": sorted(history.items()),
            "counters": dict(counters),
        }
    )
    tensors = (raw(snapshot.tensors[entry.name]).data for entry in snapshot.tree.entries)
    replace_file(path, (piece for part in ([MAGIC, struct.pack(">Q", len(header)), header], tensors) for piece in part))


def read_backup(path: Path, run_id: str) -> Backup | None:
    """The last backup of this run, or None if there is none. Damage is a StateError, never a wrong model."""
    if not path.exists():
        return None
    backup = _parse(path, run_id)
    if tree_of(backup.tensors).root != backup.root:
        raise _damaged(path)
    return backup


def salvage(path: Path, run_id: str) -> Snapshot | None:
    """What can be read of a damaged backup. It is no state of the run, but most of its chunks are still right."""
    try:
        tensors = _parse(path, run_id).tensors
        return Snapshot(int(tensors["run/epoch"].item()), tensors)
    except (StateError, KeyError):
        return None


def _damaged(path: Path) -> StateError:
    return StateError(
        Code.BAD_BACKUP,
        f"The backup {path} is damaged.",
        fix="It was put aside; what is wrong in it is fetched from other peers, if there are any.",
    )


def _parse(path: Path, run_id: str) -> Backup:
    damaged = _damaged(path)
    try:
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            raise damaged
        (length,) = struct.unpack_from(">Q", data, len(MAGIC))
        start = len(MAGIC) + 8
        header = msgpack.unpackb(data[start : start + length], strict_map_key=False)
        if header["run_id"] != run_id:
            raise StateError(
                Code.BAD_BACKUP,
                f"The backup {path} is of another run ({str(header['run_id'])[:16]}).",
                fix="It was put aside. A run file that was changed is a new run, with a new state.",
            )
        tree = StateTree.from_bytes(header["tree"], header["root"])
        offset, tensors = start + length, {}
        for entry in tree.entries:
            piece = bytearray(memoryview(data)[offset : offset + entry.num_bytes])
            if len(piece) != entry.num_bytes:
                raise damaged
            tensors[entry.name] = tensor_from(piece, entry.dtype, entry.shape)
            offset += entry.num_bytes
        history = {int(epoch): root for epoch, root in header["history"] if is_root(root)}
        counters = {str(key): int(value) for key, value in header["counters"].items()}
    except (OSError, ValueError, KeyError, TypeError, struct.error, BadTree, msgpack.UnpackException) as error:
        raise damaged from error
    return Backup(tensors, header["root"], history, counters)
