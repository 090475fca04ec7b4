"""What an auxiliary writes down of the others, epoch by epoch."""

from __future__ import annotations

from collab_core.overview import Overview
from collab_core.telemetry import EventLog


def tell_swarm(events: EventLog, seen: Overview, *, epoch: int, samples: int) -> None:
    """How everyone does, for whoever looks at the log later: our own part of an epoch says nothing of it.

    Args:
        events: where it goes.
        seen: all peers but ourselves.
        epoch: that has just ended.
        samples: in all epochs up to it.
    """
    events.write(
        "swarm",
        epoch=epoch,
        loss=seen.loss,
        samples=samples,
        samples_per_second=round(seen.samples_per_second, 2),
        trainers=len(seen.trainers),
        peers=len(seen.peers) + 1,
    )
