"""Getting a version back, and checking that all of them could be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from collab_core.archive.archive import Archive
from collab_core.archive.packs import begins_right
from collab_core.archive.safetensors import write_pieces
from collab_core.archive.store import Damaged, Held
from collab_core.archive.version import WEIGHTS, BadVersion, Version
from collab_core.errors import ArchiveError, Code
from collab_core.files import Buffer, replace_file
from collab_core.tree import TensorEntry

MODEL = "model/"  # how a run's state calls its parameters and buffers


def recover(archive: Archive, version: Version, target: Path) -> int:
    """Write a version as a safetensors file, or with its files as a folder that `from_pretrained` loads.

    Nothing is there before all of it is known to be right. In memory is one tensor at a time, and what it is
    made from.

    Args:
        archive: where it is.
        version: which one.
        target: `*.safetensors`, or a folder.

    Returns:
        Bytes of weights.
    """
    is_file = target.suffix == ".safetensors"
    has_state = any(entry.name.startswith(MODEL) for entry in version.tree.entries)  # a checkpoint is all model
    entries = [entry for entry in version.entries() if entry.name.startswith(MODEL) or not has_state]
    weights = target if is_file else target / WEIGHTS
    try:
        weights.parent.mkdir(parents=True, exist_ok=True)
        replace_file(weights, _safetensors(archive, version, entries))
        if not is_file:
            for file in version.files:
                replace_file(target / file.name, bytes(_read(archive, version, file)))
    except OSError as error:
        raise ArchiveError(
            Code.CANNOT_RECOVER,
            f"{target} cannot be written: {error.strerror or error}.",
            fix="Give another place with -o, on a disk that has room.",
        ) from error
    return sum(entry.num_bytes for entry in entries)


def _safetensors(archive: Archive, version: Version, entries: list[TensorEntry]) -> Iterator[Buffer]:
    forms = [(entry.name.removeprefix(MODEL), entry.dtype, entry.shape) for entry in entries]
    data = (_read(archive, version, entry) for entry in entries)
    return write_pieces(forms, data, {"format": "pt", "collab_root": version.root})


def _read(archive: Archive, version: Version, entry: TensorEntry) -> memoryview:
    try:
        return archive.store.read(entry)
    except Damaged as error:
        raise ArchiveError(
            Code.DAMAGED_VERSION,
            f"{entry.name} of version {version.root[:12]} cannot be recovered: {error.why}.",
            fix="`collab models verify` shows what else is damaged. `collab models pull` gets it from another archive.",
        ) from error


def verify(archive: Archive) -> tuple[int, list[str]]:
    """Read everything. How many versions were checked, and what is wrong."""
    archive.store.index.rebuild()
    path_of = archive.store.path
    # with the file it is about: what a peer that goes on saving deletes meanwhile is not bad
    bad = [(f"pack {name[:12]}: {fault}", path_of(name)) for name, fault in archive.store.index.faults().items()]
    changed = [name for name in sorted(archive.store.packs()) if not begins_right(path_of(name))]
    bad += [(f"pack {name[:12]}: it does not begin as a pack does", path_of(name)) for name in changed]
    versions, num_checked = [], 0
    for path in sorted(archive.folder.glob("versions/*.json")):
        num_checked += 1
        try:
            versions.append(Version.from_bytes(path.read_bytes(), path.stem))
        except (BadVersion, OSError) as error:
            bad.append((f"version {path.stem[:12]}: {error}", path))
    if (tags := archive.folder / "tags.json").exists() and not archive.tags():
        bad.append(("tags.json is damaged", tags))
    # tensor by tensor through all versions, newest first: every difference is undone once
    versions.sort(key=lambda version: (version.epoch or 0, version.created), reverse=True)
    by_name: dict[str, dict[bytes, tuple[TensorEntry, Version]]] = {}
    for version in versions:
        for entry in version.all_entries():
            by_name.setdefault(entry.name, {}).setdefault(entry.digest(), (entry, version))
    for name, tensors in by_name.items():
        held: Held | None = None
        for tensor, (entry, version) in tensors.items():
            try:
                if not archive.store.has(tensor):  # by itself, as `recover` reads it
                    raise Damaged("no way leads to it")
                held = Held(tensor, archive.store.read(entry, held))
            except Damaged as error:
                held = None
                about = archive.folder / "versions" / f"{version.root}.json"
                bad.append((f"{name} of version {version.root[:12]}: {error.why}", about))
    return num_checked, [words for words, place in bad if place.exists()]
