"""How long a trainer works before it meets the others."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from collab_core.averaging.link import Bandwidth
from collab_core.run.settings import RunSettings
from collab_core.swarm import Peer

RECORD_AGE_S = 0.25  # how old a record is when it arrives, about: it is told and read a few times per second
FORESIGHT_S = 1.0  # how far a record is thought on
MAX_LIKELY = 0.25  # how much of a batch may be a guess

MIN_STEPS, MAX_STEPS = 30, 500
MAX_WAITING = 0.05  # share of the time that `auto` lets go by in rounds
GRACE = 2  # with diloco, how many times its own share a trainer does before it no longer waits for the slow


def auto_steps(
    num_bytes: int, link: Bandwidth, round_s: float, step_s: float, *, overlap_steps: int = 0, num_fragments: int = 1
) -> int:
    """Steps until the whole model was averaged once, so that the link keeps up and hardly anybody waits for it.

    Args:
        num_bytes: that leave us in a round, and as many arrive: our contribution in parts, and averages.
        link: what ours carries; where nothing is known of it, the last round tells.
        round_s: what the last round took.
        step_s: what a step takes.
        overlap_steps: how many are taken while a round is under way, before it is waited for.
        num_fragments: of the model; each has a round of its own.
    """
    if step_s <= 0:
        return MIN_STEPS
    slower = min(link.upload, link.download)
    busy = (num_bytes / slower if slower else round_s) / step_s
    waiting = max(0.0, busy - overlap_steps)
    steps = num_fragments * max(busy, waiting / MAX_WAITING)
    return min(max(math.ceil(steps), MIN_STEPS), MAX_STEPS)


def is_enough(settings: RunSettings, own: int, own_target: int, others: Sequence[Peer]) -> bool:
    """Whether the swarm has done what a round needs.

    Args:
        settings: of the run.
        own: samples of ours.
        own_target: what we mean to do; only with diloco.
        others: the trainers that work on the same epoch.
    """
    cap = settings.limits.max_samples_per_peer
    if settings.strategy.name == "allreduce":
        target = settings.strategy.target_batch_size
    else:
        if own >= GRACE * own_target:
            return True
        target = own_target + sum(min(peer.record.epoch_target, cap) for peer in others)
    told = sum(min(peer.record.epoch_samples, cap) for peer in others)
    likely = sum(min(_samples_since(peer), cap) for peer in others)
    return own + told + min(likely, MAX_LIKELY * target) >= target


def _samples_since(peer: Peer) -> float:
    """What a peer has probably done since it told: records are some tenths of a second old."""
    if peer.record.phase != "working":
        return 0.0
    return peer.record.samples_per_second * min(time.monotonic() - peer.changed + RECORD_AGE_S, FORESIGHT_S)
