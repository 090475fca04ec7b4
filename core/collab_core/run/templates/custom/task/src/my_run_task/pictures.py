"""The task: a small convolutional network that names the shape in a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from collab_trainer import Batch, Block, NumberedBlocks, TaskOptions, evaluating, fill_parameters

from .drawing import KINDS, as_text, draw

BLOCK_PICTURES = 256  # one block should keep a trainer busy for a moment
HELD_OUT = Block(seed=0, number=0)
HELD_OUT_PICTURES = 256
SHOWN_PICTURES = 4


class PicturesOptions(TaskOptions):
    """`[task.options]` in run.toml; whatever is not allowed here is refused in words."""

    size: Annotated[int, Field(ge=8, le=64)] = 16
    """Rows and columns of a picture."""
    noise: Annotated[float, Field(ge=0, le=4)] = 1.0
    """How much of it covers the shape."""
    width: Annotated[int, Field(ge=4, le=256, multiple_of=4)] = 16
    """Channels of the first layer."""


class Pictures:
    """A task; `collab_trainer.Task` says what each method is for."""

    Options = PicturesOptions
    floor = None  # the lowest loss that can be reached, if you know it

    def __init__(self, *, seed: int, options: PicturesOptions) -> None:
        self.seed = seed
        self.options = options

    def build_model(self) -> nn.Module:
        width = self.options.width
        model = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),  # not BatchNorm: it counts batches in a buffer that cannot be averaged
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, len(KINDS)),
        )
        fill_parameters(model, seed=self.seed)  # torch's own random numbers differ between machines
        return model

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        return self._draw(block, BLOCK_PICTURES)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["pictures"]).float(), batch["labels"])

    def evaluate(self, model: nn.Module) -> float:
        with evaluating(model) as device:
            return float(self.loss(model, self._held_out(device)))

    def sample(self, model: nn.Module) -> str:
        with evaluating(model) as device:
            batch = self._held_out(device)
            guesses = model(batch["pictures"]).argmax(dim=1)
        is_right = guesses == batch["labels"]
        columns = []
        for number in range(SHOWN_PICTURES):
            truth, guess = KINDS[batch["labels"][number]], KINDS[guesses[number]]
            words = f"a {truth}" if truth == guess else f"a {guess}? {truth}!"
            lines = [*as_text(batch["pictures"][number, 0].cpu().numpy()), "", words]
            columns.append([line.ljust(max(self.options.size, 20)) for line in lines])
        pictures = "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
        return f"{pictures}\n\n{is_right.float().mean():.0%} of {len(guesses)} pictures are named rightly."

    def _draw(self, block: Block, count: int, *, is_held_out: bool = False) -> Batch:
        random = np.random.Generator(np.random.PCG64([block.seed, block.number, int(is_held_out)]))
        pictures, labels = draw(random, count, size=self.options.size, noise=self.options.noise)
        return {"pictures": torch.from_numpy(pictures).unsqueeze(1), "labels": torch.from_numpy(labels)}

    def _held_out(self, device: torch.device) -> Batch:
        batch = self._draw(HELD_OUT, HELD_OUT_PICTURES, is_held_out=True)
        return {name: rows.to(device) for name, rows in batch.items()}
