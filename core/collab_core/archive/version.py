"""What an archive says about one version of a model: a signed, canonical JSON file, named by the version's root."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import PurePath
from typing import Any

from blake3 import blake3

from collab_core.files import is_plain_name
from collab_core.identity import Identity, is_signed_by
from collab_core.tree import CHUNK_BYTES, BadTree, StateTree, TensorEntry, is_root

FORMAT = 1
KIND = b"collab version v1\0"  # signatures of one kind must never pass for another
MAX_VERSION_BYTES = 2**27
MAX_SIGNER_CHARS = 64
MAX_EPOCH = 2**53
MAX_TIME = 2.0**35  # some thousand years
MAX_NUMBER = 1e300
WEIGHTS = "model.safetensors"  # beside which the files of a version lie
RUNNABLE = (".py", ".pyc", ".pyd", ".so", ".pth", ".sh", ".mk", ".cfg", ".toml")
LEVELS = ("R1", "R2", "R3")


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
    """What the trainers said."""
    held_out_loss: float | None = None
    """Of the task's evaluation, where somebody measured it."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of what computed it."""
    recipe: Mapping[str, Any] | None = None
    """How a local variant was trained: seed, hashes of data, code and environment, and the command that repeats it."""
    seed: int | None = None
    """Of a local variant that has no recipe: what whoever saved it says it was trained with."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the files it was trained on, by path."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the files that trained it, by path."""
    environment: str | None = None
    """Hash of the interpreter, the machine and all packages where it was saved."""


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
        _check_types(body)  # what we could not read again is not written
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
            _check_types(body)
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


def _check_types(body: Mapping[str, Any]) -> None:
    """A signature says who wrote it, not that it makes sense."""
    provenance = body["provenance"]
    mappings = [provenance.get(name, {}) for name in ("contributors", "packages", "data", "code")]
    is_sound = (
        type(body["signer"]) is str
        and len(body["signer"]) <= MAX_SIGNER_CHARS  # decoding it takes quadratic time
        and type(body["created"]) is float
        and 0 <= body["created"] < MAX_TIME
        and (body["parent"] is None or is_root(body["parent"]))
        and type(body["is_variant"]) is bool
        and type(body["stored"]) is str
        and body["level"] in LEVELS
        and _is(provenance.get("run_id"), str)
        and _is(provenance.get("epoch"), int)
        and 0 <= (provenance.get("epoch") or 0) <= MAX_EPOCH
        and _is(provenance.get("samples"), int)
        and all(_is_number(provenance.get(name)) for name in ("samples", "loss", "held_out_loss", "seed"))
        and _is(provenance.get("recipe"), dict)
        and _is_recipe(provenance.get("recipe") or {"command": [], "code": {}, "data": {}})
        and _is(provenance.get("seed"), int)
        and _is(provenance.get("environment"), str)
        and all(type(mapping) is dict for mapping in mappings)
        and all(
            type(size) is int and size >= 0 and len(chunks) == -(-size // CHUNK_BYTES)
            for _, size, chunks in body["files"]
        )
    )
    if not is_sound:
        raise ValueError("a field of it cannot be")
    names = [name for name, _, _ in body["files"]]
    if not all(map(_may_lie_beside, names)) or len(set(names)) < len(names):
        raise ValueError("its files have names that no file of a model may have")


def _is(value: object, *kinds: type) -> bool:
    return value is None or type(value) in kinds


def _is_number(value: object) -> bool:
    """JSON has none that are larger, and none that are not finite."""
    return value is None or (type(value) in (int, float) and -MAX_NUMBER <= value <= MAX_NUMBER)  # type: ignore[operator]


def _is_recipe(recipe: Mapping[str, Any]) -> bool:
    return (
        type(recipe["command"]) is list
        and all(type(word) is str for word in recipe["command"])
        and all(type(recipe[name]) is dict for name in ("code", "data"))
        and all(_is_number(recipe.get(name)) for name in ("seconds", "seed", "metric", "tolerance"))
    )


def _may_lie_beside(name: str) -> bool:
    """Whether a file from somebody else may lie beside a model: nothing that Python or make would run."""
    suffix = PurePath(name).suffix
    return is_plain_name(name) and name != WEIGHTS and suffix != "" and suffix not in RUNNABLE


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _message(body: Mapping[str, Any]) -> bytes:
    return KIND + blake3(_canonical(body)).digest()
