"""Text from a model that predicts one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from collab_trainer.task import Task

TEMPERATURE = 0.7
COMPLETE = "complete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """How to go on with a text; the same settings always give the same."""

    num_tokens: int
    temperature: float = TEMPERATURE
    seed: int = 0

    def tokens(self, prompt: Sequence[int], logits_after: Callable[[Sequence[int]], torch.Tensor]) -> list[int]:
        """The tokens that follow, drawn one by one from what the model expects after those before."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = list(prompt)
        for _ in range(self.num_tokens):
            logits = logits_after(tokens).float().cpu()
            if self.temperature == 0:
                tokens.append(int(logits.argmax()))
                continue
            probabilities = torch.softmax(logits / self.temperature, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return tokens[len(prompt) :]


def can_complete(task: Task) -> bool:
    """Whether a task goes on with a text: it then has `complete(model, prompt, generation) -> str`."""
    return callable(getattr(task, COMPLETE, None))


def printable(text: str) -> str:
    """What a terminal can show without being told to do something."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
