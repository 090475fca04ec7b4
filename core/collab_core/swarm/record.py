"""The peer record: what each peer says about itself in the DHT, signed by its identity and checked by everyone."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Literal

import msgpack
from hivemind.dht import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collab_core.identity import Identity, is_signed_by

MAX_RECORD_BYTES = 8192
MAX_LIFETIME_S = 120.0  # a record that claims to live longer is refused: ghosts would stay for ever
MAX_SOUND = 1024
SIGNATURE_BYTES = 64
MAX_NAME_CHARS = 48
MAX_PEER_ID_CHARS = 64  # decoding base58 takes quadratic time

MAX_SENTENCES = 8
MAX_REASON_CHARS = 120

Root = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_COUNT = 2**53 - 1
MAX_EPOCH = 2**40  # no run gets there; a count that could grow no more would end whoever believed it
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Rate = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
MAX_LOSS = 1e30  # means of larger ones overflow
Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""No control characters: all of it may end on somebody's terminal."""

Mode = Literal["direct", "relay", "client"]
"""How others reach a peer: by itself, through an auxiliary, or not at all."""
Stage = Literal["training", "ending", "done"]
"""Of a gossip run, for one of its trainers."""
Phase = Literal["joining", "working", "averaging", "serving", "left"]


def told_loss(loss: float) -> float | None:
    """A loss as it can be published: None if it is none, or too large to mean anything."""
    return loss if -MAX_LOSS <= loss <= MAX_LOSS else None


class CheckpointNote(BaseModel):
    """A checkpoint that a peer put where the run keeps them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    epoch: Count
    root: Root
    revision: Annotated[str, Field(max_length=256, pattern=PRINTABLE)]


class Sentence(BaseModel):
    """A peer that another one caught in a lie, and until when it is kept out of rounds."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    peer_id: Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)]
    until_epoch: Count
    """The first epoch whose round it may join again."""
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARS, pattern=PRINTABLE)]

    def to_bytes(self) -> bytes:
        return bytes(msgpack.packb(self.model_dump()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Sentence | None:
        """None if it is not one."""
        try:
            return cls.model_validate(msgpack.unpackb(data)) if len(data) <= MAX_RECORD_BYTES else None
        except (ValidationError, ValueError, msgpack.UnpackException):
            return None


class GossipNote(BaseModel):
    """What a trainer of a gossip run tells: its model cannot be compared with others' by its root."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sketch: Annotated[bytes, Field(max_length=256)] = b""
    """Of what it brought to its last meeting (`collab_core.gossip.sketch`)."""
    distance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """How far it saw itself from the others."""
    is_for_end: bool = False
    """Its vote: the models agree, and the loss falls no more."""
    stage: Stage = "training"


class PeerRecord(BaseModel):
    """Everything a peer publishes. Strict: a record with an unknown or wrong field does not exist for others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=PRINTABLE)]
    role: Literal["trainer", "aux", "observer"]
    mode: Mode
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+!_-]{1,32}$")]
    """Shown to people in commands to type."""
    phase: Phase
    time: Rate
    """When this record was made, by the peer's clock."""
    epoch: Count = 0
    root: Root | None = None
    """Root of the state this peer holds; none while it holds no state."""
    parent_root: Root | None = None
    history_samples: Count = 0
    """Samples in all epochs of the history that led to this root, as far as this peer saw."""
    epoch_samples: Count = 0
    """Samples collected for the epoch under way."""
    epoch_target: Count = 0
    """Samples it means to collect for it, where everyone chooses by itself."""
    samples: Count = 0
    """Samples this peer contributed to finished epochs, over all of its visits."""
    epochs: Count = 0
    """In how many epochs they were."""
    seconds: Count = 0
    """How long it was here for them."""
    samples_per_second: Rate = 0.0
    upload: Rate = 0.0
    """Bytes per second that its link carries, as far as it knows; 0: unknown."""
    download: Rate = 0.0
    loss: Loss | None = None
    addresses: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=8)] = []
    grant: Annotated[str, Field(max_length=128)] = ""
    """The organiser's signature, if this auxiliary is one of theirs."""
    checkpoint: CheckpointNote | None = None
    """The last checkpoint it put on the Hub, or wherever the run keeps them."""
    sentences: Annotated[list[Sentence], Field(max_length=MAX_SENTENCES)] = []
    """Whom it caught in a lie itself; hearsay is not passed on."""
    gossip: GossipNote | None = None

    @property
    def is_reachable(self) -> bool:
        """Others can connect to it, so it can reduce, lead and serve."""
        return self.mode != "client"


def records_key(run_hash: bytes) -> str:
    """The one DHT key of a run; subkeys are peer IDs."""
    return f"collab.{run_hash.hex()}.peers"


def _message(run_hash: bytes, peer_id: str, expiration: float, payload: bytes) -> bytes:
    return b"collab record v1\0" + run_hash + struct.pack(">d", expiration) + peer_id.encode() + b"\0" + payload


def seal(record: PeerRecord, run_hash: bytes, identity: Identity, expiration: float) -> bytes:
    """Sign a record for the time it is valid: an old record cannot be replayed as a newer one."""
    payload: bytes = msgpack.packb(record.model_dump())
    return identity.sign(_message(run_hash, identity.peer_id, expiration, payload)) + payload


def unseal(value: object, run_hash: bytes, peer_id: object, expiration: float) -> PeerRecord | None:
    """Check signature and schema of a record; None if anything at all is wrong with it."""
    if not isinstance(value, bytes) or not isinstance(peer_id, str) or len(peer_id) > MAX_PEER_ID_CHARS:
        return None
    if not SIGNATURE_BYTES < len(value) <= MAX_RECORD_BYTES:
        return None
    signature, payload = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
    if not is_signed_by(peer_id, _message(run_hash, peer_id, expiration, payload), signature):
        return None
    try:
        return PeerRecord.model_validate(msgpack.unpackb(payload))
    except (ValidationError, ValueError, msgpack.UnpackException):
        return None


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Every DHT node of the run stores and returns well-signed peer records, and nothing else."""

    def __init__(self, run_hash: bytes, now: Callable[[], float]) -> None:
        self._run_hash = run_hash
        self._key = DHTID.generate(source=records_key(run_hash)).to_bytes()
        self._now = now
        self._sound: OrderedDict[tuple[bytes, bytes, float], None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """The same record comes from every node that is asked, many times a second: it is looked at once."""
        if record.key != self._key or record.expiration_time > self._now() + MAX_LIFETIME_S:
            return False
        form = (record.subkey, record.value, record.expiration_time)
        if form in self._sound:
            return True
        if not self._is_sound(record):
            return False
        self._sound[form] = None
        if len(self._sound) > MAX_SOUND:
            self._sound.popitem(last=False)
        return True

    def _is_sound(self, record: DHTRecord) -> bool:
        try:
            peer_id = MSGPackSerializer.loads(record.subkey)
            value = MSGPackSerializer.loads(record.value)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        return unseal(value, self._run_hash, peer_id, record.expiration_time) is not None
