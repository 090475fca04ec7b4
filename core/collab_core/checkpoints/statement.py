"""What a checkpointer signs: of which run, which epoch and which root its files are."""

from __future__ import annotations

import json
from typing import Annotated

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collab_core.identity import Identity, is_signed_by
from collab_core.run.manifest import Manifest, is_granted
from collab_core.swarm.record import MAX_COUNT, MAX_PEER_ID_CHARS, Root

KIND = b"collab checkpoint v1\0"
MAX_BYTES = 2**20

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class BadCheckpoint(Exception):
    """Something that is not a checkpoint of this run, or not what was signed."""


class Statement(BaseModel):
    """`collab.json` of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run_id: Annotated[str, Field(max_length=64)]
    epoch: Count
    root: Root
    history: Annotated[list[tuple[int, Root]], Field(max_length=4096)] = []
    """Roots of the epochs before."""
    history_samples: Count = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """What the trainers said."""
    held_out_loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    signer: Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)] = ""
    grant: Annotated[str, Field(max_length=128)] = ""
    """The organiser's signature under the signer's peer ID."""
    signature: Annotated[str, Field(max_length=128)] = ""

    def signed(self, identity: Identity, grant: str) -> Statement:
        """Ours, with the organiser's word for us."""
        ours = self.model_copy(update={"signer": identity.peer_id, "grant": grant, "signature": ""})
        return ours.model_copy(update={"signature": identity.sign(ours._message()).hex()})

    def _message(self) -> bytes:
        body = self.model_copy(update={"signature": ""}).model_dump(mode="json")
        return KIND + blake3(json.dumps(body, sort_keys=True).encode()).digest()

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, manifest: Manifest) -> Statement:
        """Read a statement, and check who made it.

        Raises:
            BadCheckpoint: it is of another run, or of somebody who may not make checkpoints of it.
        """
        try:
            if len(data) > MAX_BYTES:
                raise ValueError("it is too large")
            found = cls.model_validate_json(data)
            signature = bytes.fromhex(found.signature)
        except (ValidationError, ValueError) as error:
            raise BadCheckpoint("its collab.json cannot be read") from error
        if found.run_id != manifest.run_id:
            raise BadCheckpoint("it is of another run")
        if not is_signed_by(found.signer, found._message(), signature):
            raise BadCheckpoint("its signature is wrong")
        if not may_checkpoint(found.signer, found.grant, manifest):
            raise BadCheckpoint("nobody whom the organiser chose has signed it")
        return found


def may_checkpoint(peer_id: str, grant: str, manifest: Manifest) -> bool:
    """Whether a peer's checkpoints count: the run file names it, or names nobody and it is the organiser's own."""
    if named := manifest.settings.checkpoints.checkpointers:
        return peer_id in named
    return is_granted(bytes.fromhex(manifest.organiser), manifest.run_hash, peer_id, grant)
