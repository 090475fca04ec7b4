"""The other trainers of a gossip run, as their records tell: whom to meet, how far they are, how they vote."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

from collab_core.gossip.sketch import Sketch, from_bytes
from collab_core.swarm import Peer, Swarm
from collab_core.swarm.record import GossipNote

LEEWAY, LEEWAY_ROUNDS = 0.1, 20  # a part of the rounds made, and rounds: whoever meets others is as near to them
ENDING_SHARE = 0.5  # if more than this part of us is ending, it is over for everyone


class Neighbours:
    """It reads the swarm and changes nothing."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    def _noted(self) -> Iterator[tuple[Peer, GossipNote]]:
        """Trainers that have a model, with what they tell of it."""
        for peer in self._swarm.peers():
            if peer.record.role == "trainer" and peer.record.gossip is not None:
                yield peer, peer.record.gossip

    def __len__(self) -> int:
        return sum(1 for _ in self._noted())

    def partners(self, count: int, met: Sequence[str]) -> list[str]:
        """Some of those we can ask, drawn at random. Whom we cannot reach may still ask us.

        Args:
            count: so many.
            met: they come last, and of them the last one here very last.
        """
        reachable = [peer.peer_id for peer, _ in self._noted() if peer.record.is_reachable]
        random.shuffle(reachable)
        places = {peer_id: place for place, peer_id in enumerate(met)}
        return sorted(reachable, key=lambda peer_id: places.get(peer_id, -1))[:count]

    def typical_epoch(self) -> int:
        """How many rounds those who have trained have made, most of them: no newcomer believes the one with most."""
        return statistics.median_low([peer.record.epoch for peer, _ in self._noted() if peer.record.epoch] or [0])

    def plausible(self, theirs: int, own: int) -> int:
        """The round that somebody says it is in, as far as it is near ours or that of most: a lie moves us a little."""
        low, high = sorted((own, self.typical_epoch()))
        leeway = LEEWAY_ROUNDS + int(LEEWAY * high)
        return min(max(theirs, low - leeway), high + leeway)

    def donors(self, *, min_epoch: int) -> list[str]:
        """Whom a newcomer can ask for a model: those first who have met others about as often as most have."""
        typical = self.typical_epoch()
        able = [
            peer
            for peer, _ in self._noted()
            if peer.record.epoch >= min_epoch and (peer.record.is_reachable or self._swarm.is_connected(peer.peer_id))
        ]
        return [peer.peer_id for peer in sorted(able, key=lambda peer: abs(peer.record.epoch - typical))]

    def sketches(self) -> list[Sketch]:
        """What the others brought to their last meetings."""
        return [sketch for _, note in self._noted() if (sketch := from_bytes(note.sketch)) is not None]

    def votes(self) -> list[bool]:
        return [note.is_for_end or note.stage != "training" for _, note in self._noted()]

    def is_ending(self) -> bool:
        """Whether most of us, and we are not among them, have begun to end the run."""
        stages = [note.stage != "training" for _, note in self._noted()]
        return sum(stages) > ENDING_SHARE * (len(stages) + 1)

    def is_anyone_unfinished(self) -> bool:
        """Whether somebody may still want to meet us before the run is over."""
        return any(note.stage != "done" for _, note in self._noted())
