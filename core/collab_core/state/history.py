"""One rule for which history wins, everywhere.

The newest state of the organiser's auxiliaries wins. Without one, the history with most samples, as far as they are
plausible from here; then the lowest root. What nobody can hand over does not win: see `Holding.catch_up`. And nobody
gives up what most trainers did since for one epoch that an auxiliary may have ended alone: see `goes_on_from`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Tip:
    """The end of a history, as a peer claims it."""

    epoch: int
    root: str
    samples: int
    peer_id: str
    parent_root: str = ""
    is_trusted: bool = False
    """The peer is an auxiliary granted by the organiser."""

    @classmethod
    def none(cls, peer_id: str) -> Tip:
        """What a peer without any state has."""
        return cls(epoch=-1, root="", samples=-1, peer_id=peer_id)


class Standing(Enum):
    """Where we are, seen from the history that wins."""

    CURRENT = "current"
    BEHIND = "behind"
    DIVERGED = "diverged"


def winner(tips: Collection[Tip], mine: Tip, max_samples_per_epoch: int) -> Tip:
    """The tip everyone should have, among all claims and our own.

    Args:
        tips: what others claim to hold.
        mine: what we hold.
        max_samples_per_epoch: the most a whole swarm can add in an epoch; larger claims are cut to it. The cut is the
            same for everyone, so everyone finds the same winner.
    """
    everyone = [mine, *tips]
    if trusted := [tip for tip in everyone if tip.is_trusted]:
        return min(trusted, key=lambda tip: (-tip.epoch, -tip.samples, tip.root))

    def plausible_samples(tip: Tip) -> int:
        return min(tip.samples, tip.epoch * max_samples_per_epoch)

    return min(everyone, key=lambda tip: (-plausible_samples(tip), -tip.epoch, tip.root))


def goes_on_from(tip: Tip, history: Mapping[int, str]) -> bool:
    """Whether the history of somebody who is ahead of a tip goes on from it, as far as it tells.

    Or from just before it: in the moment a link breaks, one side can end an epoch that the others have to end anew.
    """
    known = history.get(tip.epoch)
    if known is None:
        return bool(history) and tip.epoch < min(history)
    return known == tip.root or history.get(tip.epoch - 1) == tip.parent_root


def standing(mine: Tip, best: Tip, history: Mapping[int, str]) -> Standing:
    """How we relate to the winning tip; `history` has the roots of our own past."""
    if best.root == mine.root:
        return Standing.CURRENT
    if best.epoch > mine.epoch:
        return Standing.BEHIND
    if best.epoch == mine.epoch:
        return Standing.DIVERGED
    # It is behind us. If it stands on a point of our own past it only has to catch up; an unknown past is given the
    # benefit of the doubt, because the epoch must not go back without need.
    known = history.get(best.epoch)
    return Standing.CURRENT if known is None or known == best.root else Standing.DIVERGED
