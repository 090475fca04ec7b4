"""What a peer's rounds need besides a network: its codec, what it owes for every vector, memory and a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS, Codec, TopKCodec
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.norms import BLOCK
from collab_core.averaging.part_sum import Tools
from collab_core.averaging.robust import REDUCTIONS
from collab_core.run.settings import RunSettings


class Toolbox:
    """Outlives the rounds; every round takes its `Tools` from here.

    Args:
        settings: of the run.
        lengths: of the vectors that are averaged, in turn, epoch by epoch.
    """

    def __init__(self, settings: RunSettings, lengths: Sequence[int]) -> None:
        strategy = settings.strategy
        self.codec: Codec = TopKCodec(strategy.keep) if strategy.codec == "topk" else CODECS[strategy.codec]
        self.adds_up = strategy.name == "diloco"
        self.buffers = Buffers()
        # one, busy: it keeps its scratch space warm, and the arithmetic is quicker than any link
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="collab-average")
        self._reduce = REDUCTIONS[strategy.reduction]
        self._lengths = tuple(lengths)
        self._feedback = [ErrorFeedback(length, self.codec.feedback_decay) for length in lengths]

    def num_values(self, epoch: int) -> int:
        """Length of the vector of this epoch."""
        return self._lengths[epoch % len(self._lengths)]

    def round_bytes(self, epoch: int) -> int:
        """What a contribution to this epoch and its average take on their way: about what a round moves per peer."""
        num_values = self.num_values(epoch)
        return self.codec.encoded_bytes(num_values) + self.codec.for_averages.encoded_bytes(num_values)

    def norm(self, epoch: int, contribution: torch.Tensor | None, weight: float) -> float:
        """Of what we would send; nobody changes the error feedback until the round is over."""
        if contribution is None or weight <= 0:
            return 0.0
        return self._feedback_of(epoch).norm(contribution, weight, self.buffers.scratch("values", BLOCK))

    def tools(self, epoch: int) -> Tools:
        """For one attempt at the round of this epoch. If it succeeds, the draft of the feedback is to be committed."""
        draft = self._feedback_of(epoch).draft()
        return Tools(self.codec, draft, self.buffers, self.thread, self._reduce, self.adds_up)

    def save_feedback(self, path: Path, run_id: str) -> None:
        """Keep what the codec lost, so that it can still be sent after a restart."""
        for turn, feedback in enumerate(self._feedback):
            feedback.save(_numbered(path, turn), run_id)

    def restore_feedback(self, path: Path, run_id: str) -> None:
        """Take up what was kept when we left, before the first round; once."""
        for turn, feedback in enumerate(self._feedback):
            feedback.restore(_numbered(path, turn), run_id)

    def forget_feedback(self, epoch: int | None = None) -> None:
        """Owe nobody anything any more; or nothing of the vector of this epoch."""
        for feedback in self._feedback if epoch is None else [self._feedback_of(epoch)]:
            feedback.forget()

    def _feedback_of(self, epoch: int) -> ErrorFeedback:
        return self._feedback[epoch % len(self._feedback)]


def _numbered(path: Path, turn: int) -> Path:
    return path if turn == 0 else path.with_stem(f"{path.stem}-{turn}")
