"""Shards of text that are neither alike nor equally large, as files: every peer has a corpus with words of its own."""

from __future__ import annotations

import random
from pathlib import Path

from collab_trainer.corpus import Corpus

SIZES = (1000, 1000, 2000, 2000, 3000, 3000, 4000, 4000)
"""Sentences of each shard."""
NUM_HELD_OUT = 1000
SHARD, HELD_OUT = "shard.txt", "held-out.txt"


def write_shards(folder: Path) -> list[Path]:
    """One folder per peer, with its shard and the same held-out sentences for everyone.

    Shard n is drawn from the built-in corpus of seed n, whose words are others than those of the next. The held-out
    sentences are from all of these corpora, from each as many as its shard is large; no shard has one of them.
    """
    draw = random.Random(0)
    folders, held_out = [], []
    for number, size in enumerate(SIZES):
        corpus = Corpus(number)
        path = folder / f"data-{number}"
        path.mkdir(parents=True)
        (path / SHARD).write_bytes(b"".join(draw.sample(corpus.train.sentences, size)))
        held_out += draw.choices(corpus.held_out.sentences, k=NUM_HELD_OUT * size // sum(SIZES))
        folders.append(path)
    draw.shuffle(held_out)
    for path in folders:
        (path / HELD_OUT).write_bytes(b"".join(held_out))
    return folders
