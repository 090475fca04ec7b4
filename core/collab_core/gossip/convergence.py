"""Whether a gossip run has come to its end: the models agree, the loss falls no more, and most peers see it so.

Nothing here talks to anybody: numbers in, a verdict out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations

from collab_core.gossip.sketch import Sketch, squared_distance, squared_length
from collab_core.run.settings import GossipSettings

SMOOTHING = 0.3  # of the running means
AGREEING_SHARE = 0.8  # of those who are there
NUM_ROUNDS_AGREED = 2  # times log2 of their number
NUM_ROUNDS_AT_THE_END = 3  # as many times; each halves what is left of the difference, or better


def theil_sen_slope(values: Sequence[float]) -> float:
    """The median of the slopes between any two of the values: a few odd ones do not matter."""
    return statistics.median((values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2))


def is_flat(losses: Sequence[float], settings: GossipSettings) -> bool:
    """Whether the loss fell by less than `plateau` (of itself) in each of the last windows."""
    window = settings.window
    if len(losses) < window * settings.num_windows:
        return False
    recent = losses[len(losses) - window * settings.num_windows :]
    return all(_falls_little(recent[start : start + window], settings) for start in range(0, len(recent), window))


def _falls_little(window: Sequence[float], settings: GossipSettings) -> bool:
    fall = -theil_sen_slope(window) * len(window)
    return fall < settings.plateau * abs(statistics.median(window))


class Convergence:
    """What one peer sees, round by round."""

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window * settings.num_windows)
        self._level: float | None = None
        """The loss when it was seen to fall no more."""
        self._distance2: float | None = None
        self._length2: float | None = None
        self._is_alone = True

    def observe(self, mine: Sketch, others: Sequence[Sketch], loss: float | None) -> None:
        """Our model and those of everyone else, as they were brought to the last meetings; our held-out loss."""
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
            self._look_at_losses()
        self._is_alone = not others
        if others:
            distance2 = statistics.fmean(squared_distance(mine, other) for other in others)
            length2 = 2 * squared_length(mine)
            if math.isfinite(distance2) and math.isfinite(length2):  # sketches of strangers may be anything
                self._distance2 = _smoothed(self._distance2, distance2)
                self._length2 = _smoothed(self._length2, length2)

    def _look_at_losses(self) -> None:
        """A loss that was seen to be flat stays so until it has really fallen.

        Losses differ from round to round by more than what counts as falling. If every round was judged by itself, a
        peer would take its word back again and again, and most would hardly ever agree.
        """
        settings = self._settings
        level = statistics.median(list(self._losses)[-settings.window :])
        if self._level is None:
            self._level = level if is_flat(tuple(self._losses), settings) else None
        elif level < self._level - settings.num_windows * settings.plateau * abs(self._level):
            self._level = None

    @property
    def distance(self) -> float | None:
        """ρ: the squared distance between two peers' models, beside that between two models with nothing in common.

        About 1 if everyone went elsewhere, 0 if all are equal; None as long as nobody else was seen.
        """
        if self._distance2 is None or self._length2 is None:
            return None
        return self._distance2 / self._length2 if self._length2 > 0 else 0.0

    @property
    def votes(self) -> bool:
        """Whether we think that it is over: we agree with the others, if there are any, and learn nothing more."""
        distance = self.distance
        agrees = self._is_alone or (distance is not None and distance < self._settings.consensus)
        return agrees and self._level is not None


class Agreement:
    """How long most have been voting for the end."""

    def __init__(self) -> None:
        self._num_rounds = 0

    def observe(self, votes: Sequence[bool]) -> bool:
        """One more round; everyone's votes, ours too. True: it is over."""
        is_agreed = sum(votes) >= AGREEING_SHARE * len(votes)
        self._num_rounds = self._num_rounds + 1 if is_agreed else 0
        return self._num_rounds >= num_rounds(NUM_ROUNDS_AGREED, len(votes))


def num_rounds(factor: int, num_peers: int) -> int:
    """`factor` · log₂ N, at least one."""
    return max(1, math.ceil(factor * math.log2(max(1, num_peers))))


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - SMOOTHING) * mean + SMOOTHING * value
