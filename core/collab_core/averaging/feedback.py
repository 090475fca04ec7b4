"""Error feedback: what lossy codecs lost in finished rounds, kept at home to be sent with the next one."""

from __future__ import annotations

import torch

from collab_core.averaging.group import Part


class ErrorFeedback:
    """Two residues: of what we sent (in units of samples, as weights change) and of what we reduced for others."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values
        self._residues: dict[str, torch.Tensor] = {}

    def draft(self) -> Draft:
        """What a round would change. Only a round that arrived whole commits its draft."""
        return Draft(self)

    def residue(self, which: str, part: Part) -> torch.Tensor | None:
        whole = self._residues.get(which)
        return None if whole is None else whole[part.start : part.stop]

    def store(self, which: str, part: Part, lost: torch.Tensor) -> None:
        if which not in self._residues:
            self._residues[which] = torch.zeros(self._num_values)
        self._residues[which][part.start : part.stop] = lost


class Draft:
    """The error feedback of one round, as it would be if the round succeeded."""

    def __init__(self, feedback: ErrorFeedback) -> None:
        self._feedback = feedback
        self._changes: list[tuple[str, Part, torch.Tensor]] = []

    def before_sending(self, values: torch.Tensor, part: Part, weight: float) -> torch.Tensor:
        residue = self._feedback.residue("sent", part)
        return values if residue is None else values + residue / weight

    def before_publishing(self, average: torch.Tensor, part: Part) -> torch.Tensor:
        residue = self._feedback.residue("reduced", part)
        return average if residue is None else average + residue

    def sent(self, part: Part, lost: torch.Tensor, weight: float) -> None:
        self._changes.append(("sent", part, lost * weight))

    def reduced(self, part: Part, lost: torch.Tensor) -> None:
        self._changes.append(("reduced", part, lost))

    def commit(self) -> None:
        for which, part, lost in self._changes:
            self._feedback.store(which, part, lost)
        self._changes.clear()
