"""The run as everyone's records tell it, for whoever looks on: `collab status`, an auxiliary's log, the dashboard."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from collab_core.averaging.verdicts import verdicts, voices_of
from collab_core.checkpoints.statement import may_checkpoint
from collab_core.run.manifest import Manifest
from collab_core.state.claims import common_tip, is_trusted
from collab_core.state.history import Tip
from collab_core.swarm import Peer
from collab_core.swarm.record import CheckpointNote, Sentence


@dataclass(frozen=True, slots=True)
class Overview:
    """One look at the run."""

    peers: Sequence[Peer]
    """Everyone who takes part."""
    tip: Tip
    """The state everyone should have; its epoch is -1 if nobody has any."""
    epoch: int
    checkpoint: CheckpointNote | None
    """The newest one of those who may make them."""
    kept_out: dict[str, Sentence]
    """Who is in quarantine, by peer ID."""
    trainers: Sequence[Peer]
    """Those whose word counts: a peer that is kept out could say anything."""
    loss: float | None
    """Mean of what the trainers say."""
    samples_per_second: float
    collected: int
    """Samples of the epoch under way."""
    target: int
    """How many it needs; 0 if nobody knows, and in a gossip run, where everyone has its own."""
    told_samples: int
    """What the trainers say they gave to finished epochs."""

    @property
    def samples(self) -> int:
        """Behind the state everyone should have; where there is none, what the trainers say they gave."""
        return max(self.tip.samples, 0) or self.told_samples


def survey(peers: Sequence[Peer], manifest: Manifest, before: Overview | None = None) -> Overview:
    """What the records of these peers say together.

    Args:
        peers: as the directory has them; who takes part itself adds its own record.
        manifest: of the run.
        before: the last look. While nobody is there, the run is where it was then.
    """
    peers = [peer for peer in peers if peer.record.role != "observer"]
    if not peers and before is not None:
        return replace(before, peers=peers, trainers=[], loss=None, samples_per_second=0.0, collected=0)
    tip = common_tip(peers, manifest)
    rounds = (peer.record.epoch for peer in peers if peer.record.gossip is not None)
    epoch = max(tip.epoch, 0, *rounds)
    notes = (
        note
        for peer in peers
        if (note := peer.record.checkpoint) and may_checkpoint(peer.peer_id, peer.record.grant, manifest)
    )
    voices = voices_of(peers, lambda peer: is_trusted(peer.peer_id, peer.record, manifest))
    kept_out = verdicts(voices, epoch)
    trainers = [peer for peer in peers if peer.record.role == "trainer" and peer.peer_id not in kept_out]
    losses = [peer.record.loss for peer in trainers if peer.record.loss is not None]
    loss = statistics.fmean(losses) if losses else math.nan
    collected, target = _progress(trainers, tip, manifest)
    return Overview(
        peers=peers,
        tip=tip,
        epoch=epoch,
        checkpoint=max(notes, key=lambda note: note.epoch, default=None),
        kept_out=kept_out,
        trainers=trainers,
        loss=loss if math.isfinite(loss) else None,
        samples_per_second=min(sum(peer.record.samples_per_second for peer in trainers), 1e15),
        collected=collected,
        target=target,
        told_samples=sum(peer.record.samples for peer in trainers),
    )


def _progress(trainers: Sequence[Peer], tip: Tip, manifest: Manifest) -> tuple[int, int]:
    """Samples of the epoch under way, and how many it needs."""
    settings = manifest.settings
    if settings.strategy.name == "gossip":
        return sum(peer.record.epoch_samples for peer in trainers), 0
    cap = settings.limits.max_samples_per_peer
    current = [peer.record for peer in trainers if peer.record.epoch == tip.epoch]
    collected = sum(min(record.epoch_samples, cap) for record in current)
    if settings.strategy.name == "allreduce":
        return collected, settings.strategy.target_batch_size
    return collected, sum(min(record.epoch_target, cap) for record in current)
