"""Documents to rows of equal length: one after the other, each with its end, cut where a row is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collab_trainer.causal_lm.tokenizer import Tokenizer

IGNORED = -100
"""Stands where a row has no token; the loss leaves it out."""


def pack(documents: Sequence[str], tokenizer: Tokenizer, row_length: int) -> torch.Tensor:
    """Rows of tokens, int64 [rows, row_length].

    What is left at the end and does not fill a row is dropped; unless it is all there is: then it is one row with
    `IGNORED` at its end, so that a small data set can still be learnt. No documents, no rows.
    """
    tokens: list[int] = []
    for encoded in tokenizer.encode(documents):
        if encoded:
            tokens += encoded
            tokens.append(tokenizer.end_of_document)
    num_rows = len(tokens) // row_length
    if num_rows == 0 and len(tokens) > 1:
        tokens += [IGNORED] * (row_length - len(tokens))
        num_rows = 1
    return torch.from_numpy(np.array(tokens[: num_rows * row_length], dtype=np.int64).reshape(num_rows, row_length))
