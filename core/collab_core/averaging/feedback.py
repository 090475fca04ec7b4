"""Error feedback: what lossy codecs lost in finished rounds, kept at home to be sent with the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from collab_core.averaging.group import Part


@dataclass(slots=True)
class ErrorFeedback:
    """Two residues: of what we sent (in units of samples, as weights change) and of what we reduced for others.

    A round writes into drafts; only a round that arrived whole makes them count.
    """

    num_values: int
    sent: torch.Tensor | None = None
    reduced: torch.Tensor | None = None
    _drafts: list[tuple[str, Part, torch.Tensor]] = field(default_factory=list)

    def before_sending(self, values: torch.Tensor, part: Part, weight: float) -> torch.Tensor:
        return values if self.sent is None else values + self.sent[part.start : part.stop] / weight

    def before_publishing(self, average: torch.Tensor, part: Part) -> torch.Tensor:
        return average if self.reduced is None else average + self.reduced[part.start : part.stop]

    def draft_sent(self, part: Part, lost: torch.Tensor, weight: float) -> None:
        self._drafts.append(("sent", part, lost * weight))

    def draft_reduced(self, part: Part, lost: torch.Tensor) -> None:
        self._drafts.append(("reduced", part, lost))

    def commit(self) -> None:
        for which, part, lost in self._drafts:
            residue = getattr(self, which)
            if residue is None:
                residue = torch.zeros(self.num_values)
                setattr(self, which, residue)
            residue[part.start : part.stop] = lost
        self._drafts.clear()

    def discard(self) -> None:
        self._drafts.clear()
