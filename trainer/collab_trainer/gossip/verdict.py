"""Where we stand among the others: how far our model is from theirs, whether it still learns, and what most say."""

from __future__ import annotations

import torch

from collab_core.gossip import NUM_ROUNDS_AT_THE_END, Agreement, Convergence, Neighbours, Sketcher, num_rounds
from collab_core.gossip.sketch import to_bytes
from collab_core.run.settings import RunSettings
from collab_core.swarm.record import GossipNote, Stage


class Verdict:
    """One trainer's view of whether the run is over, and what it tells the others of it.

    Args:
        settings: of the run.
        neighbours: the others.
        seed: of everyone's sketches.
        initial: the run's initial values.
    """

    def __init__(self, settings: RunSettings, neighbours: Neighbours, seed: bytes, initial: torch.Tensor) -> None:
        self._settings, self._neighbours = settings.gossip, neighbours
        self._has_end = settings.gossip.stop == "converged" or settings.limits.max_epochs > 0
        self._sketcher = Sketcher(seed, initial)
        self._sketch = self._sketcher.sketch(initial)
        self._convergence, self._agreement = Convergence(self._settings), Agreement()
        self.stage: Stage = "training"

    def bring(self, values: torch.Tensor) -> None:
        """What we bring to a meeting is what everyone compares."""
        self._sketch = self._sketcher.sketch(values)

    def observe(self, loss: float | None) -> bool:
        """A round is behind us, with this loss on held-out data. Whether the run is over."""
        self._convergence.observe(self._sketch, self._neighbours.sketches(), loss)
        is_agreed = self._agreement.observe([self.is_for_end, *self._neighbours.votes()])
        return self.is_ending_elsewhere or (self.can_end and is_agreed)

    @property
    def can_end(self) -> bool:
        """Whether the run ends when its trainers find that it is over."""
        return self._settings.stop == "converged"

    @property
    def distance(self) -> float | None:
        return self._convergence.distance

    @property
    def is_for_end(self) -> bool:
        """Our vote."""
        return self.stage != "training" or (self.can_end and self._convergence.votes)

    @property
    def is_ending_elsewhere(self) -> bool:
        """Whether most of us, and we are not among them, have stopped to train."""
        return self._has_end and self._neighbours.is_ending()

    def begin_to_end(self) -> int:
        """From now on we only meet others: so many times."""
        self.stage = "ending"
        self._convergence = Convergence(self._settings)  # how far we are now, not how far we were
        return num_rounds(NUM_ROUNDS_AT_THE_END, len(self._neighbours) + 1)

    def note(self) -> GossipNote:
        """For our record."""
        return GossipNote(
            sketch=to_bytes(self._sketch), distance=self.distance, is_for_end=self.is_for_end, stage=self.stage
        )
