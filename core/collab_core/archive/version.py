"""What an archive says about one version of a model: a signed, canonical JSON file, named by the version's root."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from blake3 import blake3

from collab_core.identity import Identity, is_signed_by
from collab_core.tree import BadTree, StateTree, TensorEntry

FORMAT = 1
KIND = b"collab version v1\0"  # signatures of one kind must never pass for another
MAX_VERSION_BYTES = 2**27


class BadVersion(Exception):
    """A file that is not a version, or not the one it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a version comes from. Of an epoch, the run tells; of a local variant, whoever saved it."""

    run_id: str | None = None
    epoch: int | None = None
    contributors: Mapping[str, int] = field(default_factory=dict)
    """Samples by peer."""
    samples: int | None = None
    loss: float | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of what computed it."""
    recipe: Mapping[str, Any] | None = None
    """How a local variant was trained: seed, hashes of data, code and environment, and the command that repeats it."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One model, whatever its encoding."""

    tree: StateTree
    parent: str | None
    """Root of the version it was made from."""
    is_variant: bool
    """Kept as a difference to its parent, not as a step in a run's history."""
    created: float
    """Seconds since 1970."""
    provenance: Provenance
    stored: str = ""
    """Only tensors whose names begin with this are kept; of the others, only the identity."""
    files: tuple[TensorEntry, ...] = ()
    """Files beside the weights (config, tokenizer), as tensors of bytes."""
    level: str = "R1"

    @property
    def root(self) -> str:
        return self.tree.root

    @property
    def epoch(self) -> int | None:
        return self.provenance.epoch

    def entries(self) -> list[TensorEntry]:
        """The tensors that are kept."""
        return [entry for entry in self.tree.entries if entry.name.startswith(self.stored)]

    def all_entries(self) -> list[TensorEntry]:
        """Everything that is kept: tensors and files."""
        return [*self.entries(), *self.files]

    @cached_property
    def _by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.entries()}

    def twin(self, entry: TensorEntry) -> TensorEntry | None:
        """This version's tensor of the same name, if it has the same form."""
        found = self._by_name.get(entry.name)
        if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
            return None
        return found

    def to_bytes(self, identity: Identity) -> bytes:
        """Signed."""
        body = {
            "format": FORMAT,
            "root": self.root,
            "parent": self.parent,
            "is_variant": self.is_variant,
            "created": self.created,
            "level": self.level,
            "stored": self.stored,
            "files": [[file.name, file.num_bytes, [chunk.hex() for chunk in file.chunks]] for file in self.files],
            "provenance": asdict(self.provenance),
            "tree": base64.b64encode(self.tree.to_bytes()).decode(),
            "signer": identity.peer_id,
        }
        body["signature"] = identity.sign(_message(body)).hex()
        return _canonical(body)

    @classmethod
    def from_bytes(cls, data: bytes, root: str) -> Version:
        """Read a version and check everything that can be checked without its tensors.

        Raises:
            BadVersion: it was changed after it was signed, or is of another format.
        """
        try:
            if len(data) > MAX_VERSION_BYTES:
                raise ValueError("it is too large")
            body = json.loads(data)
            if _canonical(body) != data:
                raise ValueError("it is not in its canonical form")
            written = body.pop("signature")
            signature = bytes.fromhex(written)
            if signature.hex() != written or not is_signed_by(body["signer"], _message(body), signature):
                raise ValueError("its signature is wrong")
            if body["format"] != FORMAT or body["root"] != root:
                raise ValueError(f"it is version {body['root']!r} in format {body['format']!r}")
            known = {item.name for item in fields(Provenance)}
            return cls(
                tree=StateTree.from_bytes(base64.b64decode(body["tree"], validate=True), root),
                parent=body["parent"],
                is_variant=body["is_variant"],
                created=body["created"],
                level=body["level"],
                stored=body["stored"],
                files=tuple(
                    TensorEntry(name, "uint8", (size,), tuple(bytes.fromhex(chunk) for chunk in chunks))
                    for name, size, chunks in body["files"]
                ),
                provenance=Provenance(**{key: value for key, value in body["provenance"].items() if key in known}),
            )
        except (ValueError, KeyError, TypeError, BadTree, binascii.Error, RecursionError) as error:
            raise BadVersion(str(error)) from error


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _message(body: Mapping[str, Any]) -> bytes:
    return KIND + blake3(_canonical(body)).digest()
