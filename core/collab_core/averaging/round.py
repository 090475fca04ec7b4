"""What a peer brings to a round, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from collab_core.swarm import Peer


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRequest:
    """What a peer brings to a round."""

    epoch: int
    parent_root: str
    contribution: torch.Tensor | None = None
    """Flat float32 on the CPU, read only; None to listen or to reduce for others."""
    weight: float = 0.0
    """Samples behind the contribution."""
    wants_average: bool = True
    """Receive the average; an auxiliary without state does not need it."""
    companions: Callable[[], list[Peer]]
    """Everyone else who should be in this round, as far as we know now."""
    is_missing: Callable[[str], bool] = lambda peer_id: False
    """Whether we know better than its record that a companion is gone: then we do not wait for it."""
    latecomers: Callable[[], set[str]] = set
    """Peers that are on their way to this epoch."""
    should_stop: Callable[[], bool]
    """Asked again and again while we look for a group."""
    is_patient: bool = False
    """Wait for the first trainer as long as it takes."""
    rank: Callable[[Peer], int] = lambda peer: 0
    """Who should lead: the lowest rank; 0 is for those whom the organiser vouches for. Our own is `own_rank`."""
    own_rank: int = 0
    lost: frozenset[str] = frozenset()
    """Reducers that were lost in earlier attempts at this epoch."""


@dataclass(kw_only=True, slots=True)
class RoundOutcome:
    """What came of a round: who took part, what it cost, what was lost."""

    average: torch.Tensor | None = None
    """None unless every part arrived."""
    is_behind: bool = False
    """Somebody finished this epoch without us."""
    failure: str = ""
    group: frozenset[str] = frozenset()
    """Everyone in the round, also those who sent nothing."""
    members: dict[str, float] = field(default_factory=dict)
    """Who contributed, with which weight."""
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    matchmaking_s: float = 0.0
    reducing_s: float = 0.0
    share: float = 0.0
    """The part of the vector that this peer reduced."""
    bytes_sent: int = 0
    """Since the last outcome: what others fetched from us after it is of its round."""
    bytes_received: int = 0

    @property
    def weight(self) -> float:
        return sum(self.members.values())
