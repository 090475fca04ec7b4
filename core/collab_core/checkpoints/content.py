"""The files of a checkpoint: the model as `from_pretrained` loads it, the rest of the state, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from collab_core.archive.recovery import MODEL
from collab_core.archive.safetensors import read_file, write_pieces
from collab_core.archive.version import WEIGHTS
from collab_core.checkpoints.statement import BadCheckpoint, Statement
from collab_core.errors import ArchiveError
from collab_core.files import is_plain_name, replace_file
from collab_core.run.manifest import Manifest
from collab_core.state.tensors import raw, tensor_from, tree_of

STATE = "collab-state.safetensors"  # what is not the model: the optimizer's moments, the epoch
STATEMENT = "collab.json"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole state, proven to be the one that was signed."""

    statement: Statement
    tensors: dict[str, torch.Tensor]


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], statement: Statement, files: Mapping[str, bytes], card: str
) -> None:
    """Everything a reader needs, into an empty folder."""
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    for name, content in files.items():
        if is_plain_name(name):
            replace_file(folder / name, content)
    for name, part in ((WEIGHTS, model), (STATE, rest)):
        tensors_in = {key: raw(tensor) for key, tensor in part.items()}
        forms = [(key, one.dtype, one.shape) for key, one in tensors_in.items()]
        pieces = (one.data for one in tensors_in.values())
        replace_file(folder / name, write_pieces(forms, pieces, {"format": "pt", "collab_root": statement.root}))
    replace_file(folder / CARD, card.encode())
    replace_file(folder / STATEMENT, statement.to_bytes())


def read_statement(folder: Path, manifest: Manifest) -> Statement:
    """Who says what these files are. Raises BadCheckpoint."""
    try:
        return Statement.from_bytes((folder / STATEMENT).read_bytes(), manifest)
    except OSError as error:
        raise BadCheckpoint("it has no collab.json") from error


def load_checkpoint(folder: Path, manifest: Manifest) -> Checkpoint:
    """A whole state, every bit checked against the signed root.

    Raises:
        BadCheckpoint: it is not.
    """
    statement = read_statement(folder, manifest)
    try:
        found = {f"{MODEL}{name}": tensor for name, tensor in read_file(folder / WEIGHTS).items()}
        found |= read_file(folder / STATE)
        tensors = {name: tensor_from(bytearray(one.data), one.dtype, one.shape) for name, one in found.items()}
    except ArchiveError as error:
        raise BadCheckpoint(error.message) from error
    if tree_of(tensors).root != statement.root:
        raise BadCheckpoint("its files are not what was signed")
    return Checkpoint(statement, tensors)
