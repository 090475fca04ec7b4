"""The text that evaluation measures on: fixed, the same for every peer with the same data, never trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from collab_core.errors import Code, TaskError
from collab_trainer.causal_lm.documents import LocalDocuments, is_held_out
from collab_trainer.causal_lm.options import CausalLMOptions, DataOptions
from collab_trainer.causal_lm.packing import pack
from collab_trainer.causal_lm.streaming import streamed
from collab_trainer.causal_lm.tokenizer import Tokenizer

MAX_STREAMED = 20_000  # documents looked at for held-out ones; a stream may have no end


def held_out_rows(options: CausalLMOptions, tokenizer: Tokenizer, opened: Callable[[DataOptions], Any]) -> torch.Tensor:
    """Rows of held-out text, from every source by its weight.

    Args:
        options: of the task.
        tokenizer: of the run.
        opened: gives the documents or the stream of a source.

    Raises:
        TaskError: NO_DATA, nothing is held out.
    """
    evaluation = options.evaluation
    sources = evaluation.data or options.data
    one_in = 0 if evaluation.data else evaluation.one_in
    total = sum(source.weight for source in sources)
    parts = []
    for source in sources:
        num_rows = max(1, round(evaluation.num_sequences * source.weight / total))
        parts.append(_rows(_documents(source, opened, one_in), tokenizer, options.sequence_length + 1, num_rows))
    rows = torch.cat(parts)[: evaluation.num_sequences]
    if not len(rows):
        raise TaskError(
            Code.NO_DATA,
            f"None of the documents is held out for evaluation (one in {one_in} is, by its hash).",
            fix="Lower one_in under [task.options.evaluation], give it data of its own, or cut text files into more "
            'documents: documents = "line".',
        )
    return rows


def _documents(source: DataOptions, opened: Callable[[DataOptions], Any], one_in: int) -> Iterator[str]:
    """Documents for evaluation, in the order of the source."""
    if source.repo:
        found: Iterator[str] = islice(streamed(opened(source), source), MAX_STREAMED)
    else:
        documents: LocalDocuments = opened(source)
        found = (documents[index] for index in range(len(documents)))
    return (document for document in found if document and (one_in == 0 or is_held_out(document, one_in)))


def _rows(documents: Iterator[str], tokenizer: Tokenizer, row_length: int, num_rows: int) -> torch.Tensor:
    """The first rows that these documents fill, reading no more of them than needed."""
    taken: list[str] = []
    num_tokens = 0
    for document in documents:
        taken.append(document)
        num_tokens += len(tokenizer.encode([document])[0]) + 1
        if num_tokens >= num_rows * row_length:
            break
    return pack(taken, tokenizer, row_length)[:num_rows]
