"""All contributions to one part, kept as they came until the last one is there, for reductions that compare them."""

from __future__ import annotations

import torch

from collab_core.averaging.feedback import Draft
from collab_core.averaging.group import Part
from collab_core.averaging.part_sum import PartSum, Sender, Tools
from collab_core.averaging.robust import fair_weights


class PartStack(PartSum):
    """Like a sum, but what is added in the end is what the reduction makes of all contributions.

    It takes the memory of every sender's encoded part, and while it is reduced 4 bytes for each of their values.
    """

    def __init__(self, part: Part, own: torch.Tensor | None, mine: Sender, average: torch.Tensor) -> None:
        super().__init__(part, own, mine, average)
        self._kept: list[tuple[bytearray, Sender]] = []

    def take(self, payload: bytearray, values: torch.Tensor, sender: Sender, tools: Tools) -> None:
        self._kept.append((payload, sender))
        self.weight += sender.weight

    def begin_sum(self, feedback: Draft) -> None:
        feedback.begin_sum(self.part, None, 0.0)
        self.own = None if self.own is None else self.own * self.mine.factor

    def total(self, tools: Tools) -> torch.Tensor:
        assert tools.reduce is not None
        senders = [sender for _, sender in self._kept]
        rows = torch.empty(len(senders) + (self.own is not None), self.part.num_values)
        for row, (payload, sender) in zip(rows, self._kept, strict=False):
            tools.codec.decode(payload, row)
            row.mul_(sender.factor)
            tools.buffers.give_back(payload)
        if self.own is not None:
            rows[-1] = self.own
            senders.append(self.mine)
        self._kept.clear()
        reduced = tools.reduce(rows, fair_weights([sender.weight for sender in senders]))
        return super().total(tools).add_(reduced, alpha=self.weight)
