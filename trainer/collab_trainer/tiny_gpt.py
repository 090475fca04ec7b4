"""The built-in task: a very small GPT-2 that learns the built-in corpus, byte by byte, on any laptop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from collab_core.run.settings import Section
from collab_trainer.corpus import Corpus
from collab_trainer.evaluating import evaluating
from collab_trainer.generating import Generation, printable
from collab_trainer.gpt2 import GPT2, GPT2Config
from collab_trainer.seeding import fill_parameters
from collab_trainer.task import Batch, Block, NumberedBlocks

VOCABULARY = 256
POSITION_STD = 0.02
EVALUATION_WINDOWS = 64
EVALUATION_BLOCK = Block(seed=0, number=0)
BLOCK_WINDOWS = 512
SAMPLE_PROMPTS = (("the ", 112), ("1", 48))
"""What each sample starts with, and how many bytes follow."""


class TinyGPTOptions(Section):
    """`[task.options]` of tiny-gpt."""

    layers: Annotated[int, Field(ge=1, le=48)] = 2
    heads: Annotated[int, Field(ge=1, le=64)] = 4
    """Attention heads; width must be a multiple of it."""
    width: Annotated[int, Field(ge=8, le=4096)] = 64
    sequence_length: Annotated[int, Field(ge=16, le=4096)] = 128
    """Bytes the model sees at once."""
    corpus_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Selects the words of the corpus."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TinyGPTOptions:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        return self


class TinyGPT:
    """A task (see `collab_trainer.task.Task`).

    Args:
        seed: of the initial parameters.
        options: sizes of the model, and which corpus.
    """

    def __init__(self, *, seed: int, options: TinyGPTOptions) -> None:
        self.seed = seed
        self.options = options

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(self.options.corpus_seed)

    @cached_property
    def floor(self) -> float:
        """What a perfect model of the whole grammar would score in `evaluate`: exact, see `collab_trainer.corpus`."""
        return self.corpus.whole.ideal_loss(self._evaluation_batch["tokens"].numpy())

    def build_model(self) -> torch.nn.Module:
        options = self.options
        config = GPT2Config(
            vocabulary=VOCABULARY,
            positions=options.sequence_length,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
        )
        model = GPT2(config)
        fill_parameters(model, seed=self.seed, std_of=lambda name, _: _initial_std(name, options))
        return model

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        return {"tokens": self._windows(block, BLOCK_WINDOWS)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        tokens = batch["tokens"].to(_device(model))
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def evaluate(self, model: torch.nn.Module) -> float:
        with evaluating(model):
            return float(self.loss(model, self._evaluation_batch))

    def sample(self, model: torch.nn.Module) -> str:
        return "\n".join(
            self.complete(model, prompt, Generation(num_tokens=num_bytes)) for prompt, num_bytes in SAMPLE_PROMPTS
        )

    def complete(self, model: torch.nn.Module, prompt: str, generation: Generation) -> str:
        """The prompt and what the model makes of it."""
        text = prompt.encode(errors="replace") or b"\n"

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            seen = torch.tensor([tokens[-self.options.sequence_length :]], device=_device(model))
            logits: torch.Tensor = model(seen)[0, -1]
            return logits

        with evaluating(model):
            return printable(prompt + bytes(generation.tokens(text, logits_after)).decode(errors="replace"))

    @cached_property
    def _evaluation_batch(self) -> Batch:
        return {"tokens": self._windows(EVALUATION_BLOCK, EVALUATION_WINDOWS, held_out=True)}

    def _windows(self, block: Block, count: int, *, held_out: bool = False) -> torch.Tensor:
        length = self.options.sequence_length
        return torch.from_numpy(self.corpus.windows(*block, count=count, sequence_length=length, held_out=held_out))


def _initial_std(name: str, options: TinyGPTOptions) -> float:
    # GPT-2's 0.02 everywhere suits its width of 768; at 64 it needs twice the epochs for the first words.
    if name.endswith(".wpe.weight"):
        return POSITION_STD
    std = 1 / math.sqrt(options.width)
    # Two projections per layer add to the residual stream: smaller, so that the sum does not grow with the depth.
    return std / math.sqrt(2 * options.layers) if name.endswith(".c_proj.weight") else std


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
