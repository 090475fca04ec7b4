"""A group: who averages together in one round, and which part of the vector each of them reduces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgpack
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collab_core.averaging.shares import Load, divide

MAX_PART_VALUES = 2**20  # 2 MiB of fp16: every part costs about half a millisecond, whatever its size
MIN_PART_VALUES = 2**16
MIN_PARTS = 8  # of a share, so that it is sent, reduced and sent back at the same time
MAX_GATHER_BYTES = 2048
GROUP_ID_BYTES = 16
MAX_MEMBERS = 256
MAX_LOST = 8
MAX_RATE = 1e12


Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]


class Member(BaseModel):
    """What a peer declares when it joins a round. Others hold it to that."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    peer_id: Annotated[str, Field(max_length=128)]
    epoch: Annotated[int, Field(ge=0)]
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Samples behind the contribution; 0 sends nothing and only listens."""
    norm: float = 0.0
    """Of the vector it will send, before it is encoded."""
    can_reduce: bool
    """Others can connect to it, so it may reduce a part for them."""
    wants_average: bool = True
    upload: Rate = 0.0
    """Bytes per second its link carries; 0 if it does not know."""
    download: Rate = 0.0
    lost: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_LOST)] = []
    """Reducers this peer lost in earlier attempts at this epoch: they get nothing to reduce this time."""

    def to_bytes(self) -> bytes:
        return bytes(msgpack.packb(self.model_dump()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Member | None:
        if len(data) > MAX_GATHER_BYTES:
            return None
        try:
            return cls.model_validate(msgpack.unpackb(data))
        except (ValidationError, ValueError, msgpack.UnpackException):
            return None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the flat vector that one peer reduces in one piece."""

    start: int
    stop: int

    @property
    def num_values(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Group:
    """A closed group. Everyone in it computes the same division of labour from the same members."""

    group_id: bytes
    members: tuple[Member, ...]

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members)

    @property
    def senders(self) -> dict[str, float]:
        """Who contributes, with which declared weight."""
        return {member.peer_id: member.weight for member in self.members if member.weight > 0}

    @property
    def norms(self) -> dict[str, float]:
        """Who contributes, with which declared norm."""
        return {member.peer_id: member.norm for member in self.members if member.weight > 0}

    def parts(self, num_values: int) -> dict[str, list[Part]]:
        """Each reducer's parts, in the order in which they travel."""
        loads = [
            Load(m.can_reduce, m.weight > 0, m.wants_average, upload=m.upload, download=m.download)
            for m in self.members
        ]
        shares = divide(num_values, loads)
        plan: dict[str, list[Part]] = {}
        start = 0
        for member, share in zip(self.members, shares, strict=True):
            if share:
                plan[member.peer_id] = split(start, start + share)
            start += share
        return plan


def close_group(token: bytes, leader: str, members: Sequence[Member]) -> Group:
    """A group in which nobody reduces whom others could not reach; the leader stays, it is known to be reachable."""
    lost = {peer_id for member in members for peer_id in member.lost} - {leader}
    ordered = sorted(members, key=lambda member: member.peer_id)
    return name_group(token, [m.model_copy(update={"can_reduce": False}) if m.peer_id in lost else m for m in ordered])


def name_group(token: bytes, members: Sequence[Member]) -> Group:
    """The group of a leader's token and members.

    Its ID follows from everything that was declared. So a leader that tells two peers different things sends them to
    different groups: neither can be made to believe that the other one broke its word.
    """
    digest = blake3(b"collab group v1\0" + token)
    for member in members:
        digest.update(member.to_bytes())
    return Group(digest.digest(GROUP_ID_BYTES), tuple(members))


def split(start: int, stop: int) -> list[Part]:
    """Cut what a peer reduces into parts."""
    size = min(max(math.ceil((stop - start) / MIN_PARTS), MIN_PART_VALUES), MAX_PART_VALUES)
    return [Part(first, min(first + size, stop)) for first in range(start, stop, size)]


def round_key(layout_hash: bytes, epoch: int, parent_root: str) -> bytes:
    """What must be equal to average together. hivemind's group key knows no epoch; this is its schema hash here."""
    return blake3(b"collab round v1\0" + layout_hash + epoch.to_bytes(8, "big") + bytes.fromhex(parent_root)).digest()


def check_weight(weight: float, cap: float) -> str:
    """Why a weight is refused; empty if it is fine."""
    if not math.isfinite(weight) or weight < 0 or 0 < weight < 1:
        return f"weight {weight!r} is not a number of samples"
    if weight > cap:
        return f"weight {weight:g} is above the run's limit of {cap:g} samples per peer and epoch"
    return ""


def leader_order(key: bytes, ranks: Mapping[str, int]) -> list[str]:
    """Who should lead this round, best first: by rank, then by lot. Who knows the same peers finds the same order."""
    return sorted(ranks, key=lambda peer_id: (ranks[peer_id], blake3(key + peer_id.encode()).digest()))
