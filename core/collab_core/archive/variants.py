"""Models that somebody changed at home: stored against what they were made from."""

from __future__ import annotations

from pathlib import Path

from collab_core.archive.archive import Archive
from collab_core.archive.recovery import MODEL
from collab_core.archive.safetensors import read_file
from collab_core.archive.version import Provenance, Version
from collab_core.tree import RawTensor

WEIGHTS = "model.safetensors"
MAX_FILE_BYTES = 2**26
FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def save_checkpoint(
    archive: Archive, checkpoint: Path, *, parent: Version | None = None, provenance: Provenance | None = None
) -> Version:
    """Keep a checkpoint; with a folder, its config and tokenizer too."""
    is_folder = checkpoint.is_dir()
    tensors = read_file(checkpoint / WEIGHTS if is_folder else checkpoint)
    files = {}
    if is_folder:
        paths = sorted(path for pattern in FILES for path in checkpoint.glob(pattern))
        files = {path.name: path.read_bytes() for path in paths if path.stat().st_size <= MAX_FILE_BYTES}
    return archive.save(
        _named_like(tensors, parent),
        provenance or Provenance(),
        parent=parent.root if parent is not None else None,
        is_variant=True,
        files=files,
    )


def _named_like(tensors: dict[str, RawTensor], parent: Version | None) -> dict[str, RawTensor]:
    """A run's state calls its parameters `model/…`; equal names are what makes small differences."""
    if parent is None or not any(entry.name.startswith(MODEL) for entry in parent.tree.entries):
        return tensors
    return {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
