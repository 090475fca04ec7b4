"""Whose model a newcomer to a gossip run begins with."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from collab_core.gossip import Meetings, Neighbours
from collab_core.swarm import Swarm

ADOPTING_S = 60.0  # how long it asks for their models before it begins with the initial one
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Adopted:
    """Somebody's model, and the round to go on from."""

    epoch: int
    values: torch.Tensor


def adopt(
    swarm: Swarm, neighbours: Neighbours, meetings: Meetings, *, is_needed: bool, stop: threading.Event
) -> Adopted | None:
    """The model of whoever has trained. If all are at the beginning, so are we, and None is the answer.

    Args:
        is_needed: we do not have the model that the run began with, so anybody's is better than ours.
    """
    deadline = time.monotonic() + ADOPTING_S
    while not stop.is_set():
        donors = neighbours.donors(min_epoch=0 if is_needed else 1)
        if not is_needed and (not donors or time.monotonic() > deadline):
            break
        for donor in donors:
            if (fetched := meetings.fetch(donor, stop)) is not None:
                adopted = Adopted(min(fetched[0], neighbours.typical_epoch()), fetched[1])
                name, num_bytes = swarm.name_of(donor), adopted.values.nbytes
                swarm.events.write("adopted", epoch=adopted.epoch, peer_id=donor, name=name, bytes=num_bytes)
                return adopted
        stop.wait(PAUSE_S)
        swarm.refresh()
    return None
