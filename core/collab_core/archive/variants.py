"""Models that somebody changed at home: stored against what they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collab_core.archive.archive import Archive
from collab_core.archive.environment import environment_hash, file_hashes, package_versions
from collab_core.archive.recovery import MODEL
from collab_core.archive.safetensors import read_file
from collab_core.archive.version import WEIGHTS, Provenance, Version
from collab_core.errors import ArchiveError, Code
from collab_core.files import is_plain_name
from collab_core.tree import RawTensor

MAX_FILE_BYTES = 2**26
FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def save_checkpoint(
    archive: Archive, checkpoint: Path, *, parent: Version | None = None, provenance: Provenance | None = None
) -> Version:
    """Keep a checkpoint; with a folder, its config and tokenizer too. It says what is installed here."""
    tensors, files = read_checkpoint(checkpoint, parent)
    return archive.save(
        tensors,
        provenance or local_provenance(),
        parent=parent.root if parent is not None else None,
        is_variant=True,
        files=files,
    )


def local_provenance(
    *, seed: int | None = None, data: Sequence[Path] = (), code: Sequence[Path] = (), folder: Path | None = None
) -> Provenance:
    """Where a model that was made on this machine comes from.

    Args:
        seed: it was trained with.
        data: files it was trained on.
        code: files that trained it.
        folder: where those are; by default the current one.

    Raises:
        ArchiveError: BAD_CHECKPOINT, one of the files cannot be read.
    """
    where = folder or Path.cwd()
    try:
        hashes = [file_hashes(where, paths) for paths in (data, code)]
    except OSError as error:
        raise ArchiveError(
            Code.BAD_CHECKPOINT, f"The model cannot be saved with its origin: {error}.", fix="Correct --data or --code."
        ) from error
    return Provenance(
        seed=seed, data=hashes[0], code=hashes[1], packages=package_versions(), environment=environment_hash()
    )


def read_checkpoint(checkpoint: Path, parent: Version | None) -> tuple[dict[str, RawTensor], dict[str, bytes]]:
    """The tensors of a file or folder, called as those of its parent; and what lies beside them in a folder."""
    is_folder = checkpoint.is_dir()
    tensors = read_file(checkpoint / WEIGHTS if is_folder else checkpoint)
    files = {}
    if is_folder:
        paths = sorted(path for pattern in FILES for path in checkpoint.glob(pattern) if path.is_file())
        try:
            fit = [path for path in paths if is_plain_name(path.name) and path.stat().st_size <= MAX_FILE_BYTES]
            files = {path.name: path.read_bytes() for path in fit}
        except OSError as error:
            raise ArchiveError(
                Code.BAD_CHECKPOINT,
                f"{error.filename} cannot be read: {error.strerror or error}.",
                fix="Give a folder whose files you may read.",
            ) from error
    return _named_like(tensors, parent), files


def _named_like(tensors: dict[str, RawTensor], parent: Version | None) -> dict[str, RawTensor]:
    """A run's state calls its parameters `model/…`; equal names are what makes small differences."""
    if parent is None or not any(entry.name.startswith(MODEL) for entry in parent.tree.entries):
        return tensors
    return {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
