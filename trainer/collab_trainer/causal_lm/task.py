"""The task causal-lm: any causal model of `transformers` learns text that peers bring or stream."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from collab_core.errors import Code, TaskError
from collab_trainer.causal_lm.blocks import DocumentBlocks, source_positions
from collab_trainer.causal_lm.documents import LocalDocuments, find_files
from collab_trainer.causal_lm.files import find_weights
from collab_trainer.causal_lm.held_out import held_out_rows
from collab_trainer.causal_lm.model import build_model, checkpoint_gradients, load_model, model_root, read_config
from collab_trainer.causal_lm.options import CausalLMOptions, DataOptions
from collab_trainer.causal_lm.packing import IGNORED, pack
from collab_trainer.causal_lm.reading import LocalReader, Reader
from collab_trainer.causal_lm.streaming import StreamReader, open_stream
from collab_trainer.causal_lm.tokenizer import CONFIG, load_tokenizer, read_json
from collab_trainer.context import TaskContext
from collab_trainer.evaluating import evaluating
from collab_trainer.generating import Generation, printable
from collab_trainer.task import Batch

MIN_BLOCK_CHARS = 32 * 1024
BLOCK_CHARS_PER_TOKEN = 64  # a block has some sixteen rows of text at four characters a token
EVALUATION_BATCH = 8
SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOKENS = 120


class CausalLM:
    """A task (see `collab_trainer.task.Task`).

    Args:
        seed: of the initial parameters, if they are not from published weights.
        options: model, tokenizer, data.
        context: the run's files, and where local data is.
    """

    floor: float | None = None

    def __init__(self, *, seed: int, options: CausalLMOptions, context: TaskContext) -> None:
        self.seed, self.options, self.context = seed, options, context
        if context.needs_data:  # what is missing is said before transformers is loaded, which takes seconds
            for source in options.data:
                if not source.repo:
                    find_files(source, context.data_dir)
        self.tokenizer = load_tokenizer(options, context.assets)
        typed = options.model.config
        fields = dict(typed) if typed else read_json(context.assets.get(CONFIG, b""), CONFIG)
        self.config = read_config(fields, self.tokenizer, options.sequence_length, is_typed=bool(typed))
        self._opened: dict[str, Any] = {}
        if context.needs_data:  # before others count on us, and not while they wait
            for source in options.data:
                self._open(source)

    def build_model(self) -> torch.nn.Module:
        """The model, initialised from the seed, or with the published weights where the organiser's folder is.

        Elsewhere published weights are not downloaded: peers have them, as the run's initial state.
        """
        options, run_dir = self.options.model, self.context.run_dir
        if options.config or run_dir is None:
            model = build_model(self.config, seed=self.seed if options.config else None)
        else:
            model = load_model(self.config, find_weights(options, run_dir))
            if options.root and (root := model_root(model)) != options.root:
                raise TaskError(
                    Code.BAD_MODEL,
                    f"The weights of {options.repo or options.path} have the root {root}, and the run file pins "
                    f"{options.root}.",
                    fix="Put the published weights back, or publish these with `collab publish-model`.",
                )
        if self.options.gradient_checkpointing:
            checkpoint_gradients(model)
        return model

    # --- data ---

    @property
    def dataset_size(self) -> int | None:
        """Documents in the files this peer brings; None if some of its data is streamed."""
        if any(source.repo for source in self.options.data) or not self.context.needs_data:
            return None
        return sum(len(self._open(source)) for source in self.options.data)

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> DocumentBlocks:
        sources = self.options.data
        positions = source_positions(position, len(sources))
        readers = [
            self._reader(source, f"{seed}/{index}", kept)
            for index, (source, kept) in enumerate(zip(sources, positions, strict=True))
        ]
        return DocumentBlocks(
            readers,
            [source.weight for source in sources],
            seed=seed,
            block_chars=max(MIN_BLOCK_CHARS, BLOCK_CHARS_PER_TOKEN * self._row_length),
            given=position.get("given", ()) if position else (),
        )

    def samples(self, block: Sequence[str]) -> Batch:
        return {"tokens": pack(block, self.tokenizer, self._row_length)}

    def _reader(self, source: DataOptions, key: str, position: Mapping[str, Any] | None) -> Reader:
        one_in = 0 if self.options.evaluation.data else self.options.evaluation.one_in
        if source.repo:
            return StreamReader(self._open(source), source, key=key, one_in=one_in, position=position)
        return LocalReader(self._open(source), key=key, one_in=one_in, position=position)

    def _open(self, source: DataOptions) -> Any:
        """`LocalDocuments`, or the stream of a data set; each is opened once."""
        name = source.model_dump_json()
        if name not in self._opened:
            opening = open_stream if source.repo else self._read_files
            self._opened[name] = opening(source)
        return self._opened[name]

    def _read_files(self, source: DataOptions) -> LocalDocuments:
        return LocalDocuments(source, self.context.data_dir, self._cache_dir)

    @property
    def _row_length(self) -> int:
        return self.options.sequence_length + 1

    @property
    def _cache_dir(self) -> Path:
        return self.context.cache_dir or Path(self._temporary.name)

    @cached_property
    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="collab-data-")

    # --- loss ---

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        output, loss = self._forward(model, batch["tokens"])
        if getattr(output, "aux_loss", None) is not None:  # experts that are never chosen learn nothing
            loss = loss + getattr(self.config, "router_aux_loss_coef", 0.0) * output.aux_loss.to(loss.device)
        return loss

    def _forward(self, model: torch.nn.Module, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
        tokens = tokens.to(next(model.parameters()).device)
        output = model(input_ids=tokens[:, :-1].clamp(min=0))
        logits = output.logits.flatten(0, 1).float()
        return output, torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=IGNORED)

    def evaluate(self, model: torch.nn.Module) -> float:
        total, num_targets = 0.0, 0
        with evaluating(model):
            for rows in torch.split(self._evaluation_rows, EVALUATION_BATCH):
                count = int((rows[:, 1:] != IGNORED).sum())
                total += float(self._forward(model, rows)[1]) * count
                num_targets += count
        return total / num_targets

    @cached_property
    def _evaluation_rows(self) -> torch.Tensor:
        return held_out_rows(self.options, self.tokenizer, self._open)

    # --- something to look at ---

    def sample(self, model: torch.nn.Module) -> str:
        return self.complete(model, "", Generation(num_tokens=SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE))

    def complete(self, model: torch.nn.Module, prompt: str, generation: Generation) -> str:
        """The prompt, as the beginning of a document, and what the model makes of it."""
        begin = [self.tokenizer.end_of_document, *self.tokenizer.encode([prompt])[0]]

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            seen = torch.tensor([tokens[-self.options.sequence_length :]], device=device)
            logits: torch.Tensor = model(input_ids=seen).logits[0, -1, : self.tokenizer.num_tokens]
            return logits

        with evaluating(model) as device:
            tokens = generation.tokens(begin, logits_after)
        return printable(self.tokenizer.decode([*begin[1:], *tokens]))
