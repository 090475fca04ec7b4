"""Error feedback: what lossy codecs lost in finished rounds, kept at home to be sent with the next one."""

from __future__ import annotations

import torch

from collab_core.averaging.group import Part


class ErrorFeedback:
    """One residue per value, in units of samples.

    A sender's loss counts as much as its samples do, a reducer's as much as everyone's. In these units both are the
    same thing, so it does not matter whether we send a part in the next round or reduce it.
    """

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values
        self._spare: torch.Tensor | None = None
        self.residue: torch.Tensor | None = None

    def draft(self) -> Draft:
        """What a round would change. Only a round that arrived whole commits its draft."""
        lost, self._spare = self._spare, None  # memory that is warm already; a failed round's is not used again
        return Draft(self, torch.empty(self._num_values) if lost is None else lost)

    def store(self, lost: torch.Tensor, parts: list[Part]) -> None:
        """Take over what was lost of these parts; of the others, the residue stays."""
        if self.residue is None and parts:
            self.residue = torch.zeros(self._num_values)
        if self.residue is not None and sum(part.num_values for part in parts) == self._num_values:
            self.residue, lost = lost, self.residue
        elif self.residue is not None:
            for part in parts:
                self.residue[part.start : part.stop] = lost[part.start : part.stop]
        self._spare = lost


class Draft:
    """The error feedback of one round, as it would be if the round succeeded."""

    def __init__(self, feedback: ErrorFeedback, lost: torch.Tensor) -> None:
        self._feedback, self._lost = feedback, lost
        self._parts: list[Part] = []

    # --- of what we send ---

    def with_residue(self, values: torch.Tensor, part: Part, weight: float, out: torch.Tensor) -> torch.Tensor:
        """The values and what was lost of this part before; `weight` is what the values will count."""
        residue = self._residue(part)
        return values if residue is None else torch.add(values, residue, alpha=1 / weight, out=out)

    def note(self, part: Part, values: torch.Tensor, decoded: torch.Tensor, weight: float) -> None:
        """Remember what the codec lost of a part."""
        torch.sub(values, decoded, out=self.sum(part)).mul_(weight)
        self._parts.append(part)

    # --- of what we reduce ---

    def begin_sum(self, part: Part, own: torch.Tensor | None, weight: float) -> None:
        """Begin a weighted sum with what was lost before, and with our own contribution if there is one."""
        total, residue = self.sum(part), self._residue(part)
        if own is None:
            total.zero_() if residue is None else total.copy_(residue)
        elif residue is None:
            torch.mul(own, weight, out=total)
        else:
            torch.add(residue, own, alpha=weight, out=total)

    def sum(self, part: Part) -> torch.Tensor:
        return self._lost[part.start : part.stop]

    def end_sum(self, part: Part, decoded: torch.Tensor, weight: float) -> None:
        """Of the sum stays what its mean lost when it was encoded."""
        self.sum(part).sub_(decoded, alpha=weight)
        self._parts.append(part)

    def _residue(self, part: Part) -> torch.Tensor | None:
        residue = self._feedback.residue
        return None if residue is None else residue[part.start : part.stop]

    def commit(self) -> None:
        self._feedback.store(self._lost, self._parts)
