"""Where each tensor lies in the flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collab_core.update.exact import BLOCK


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's place in the flat vector."""

    name: str
    start: int
    size: int
    decays: bool
    """Whether weight decay applies: False for biases and norms."""

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the flat vector to update in one go: at most one block, all of it decaying or none."""

    start: int
    stop: int
    decays: bool


def check_segments(segments: Sequence[Segment], num_params: int) -> None:
    """Segments must follow each other without gaps from 0 to `num_params`.

    Raises:
        ValueError: they do not.
    """
    position = 0
    for segment in segments:
        if segment.start != position or segment.size < 0:
            raise ValueError(f"segment {segment.name!r} should start at {position}, got {segment}")
        position = segment.stop
    if position != num_params:
        raise ValueError(f"segments cover {position} parameters of {num_params}")


def cut_into_pieces(segments: Sequence[Segment]) -> list[Piece]:
    """Join neighbours that are treated alike, then cut what is longer than a block."""
    stretches: list[Piece] = []
    for segment in segments:
        if segment.size == 0:
            continue
        start = segment.start
        if stretches and stretches[-1].decays == segment.decays:
            start = stretches.pop().start
        stretches.append(Piece(start, segment.stop, segment.decays))
    return [
        Piece(start, min(start + BLOCK, stretch.stop), stretch.decays)
        for stretch in stretches
        for start in range(stretch.start, stretch.stop, BLOCK)
    ]
