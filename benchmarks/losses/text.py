"""What the arms learn: the built-in corpus, whose floor is known, and a real text: the sources of Python's library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from collab_trainer.corpus import Windows, is_held_out
from collab_trainer.task import Batch, Block
from collab_trainer.tiny_gpt import EVALUATION_BLOCK, TinyGPT, TinyGPTOptions

MODEL = {"layers": 2, "width": 64, "sequence_length": 64}
NUM_EVALUATION_WINDOWS = 256
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}


class Corpus(TinyGPT):
    """The built-in task with more held-out text: small differences count here."""

    @cached_property
    def _evaluation_batch(self) -> Batch:
        return {"tokens": self._windows(EVALUATION_BLOCK, NUM_EVALUATION_WINDOWS, held_out=True)}


class Library(Corpus):
    """The same model on the sources of the installed Python; one file in sixteen is held out."""

    floor = None  # type: ignore[assignment]  # nobody knows it

    @cached_property
    def corpus(self) -> Any:
        return library_text()


class LibraryText:
    """Windows of bytes from anywhere in the library."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)]
        texts: dict[bool, list[bytes]] = {False: [], True: []}
        for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
            texts[is_held_out(name.encode())].append(path.read_bytes())
        self._texts = {kind: np.frombuffer(b"".join(parts), dtype=np.uint8) for kind, parts in texts.items()}

    def windows(
        self, peer_seed: int, block: int, *, count: int, sequence_length: int, held_out: bool = False
    ) -> Windows:
        """As those of the built-in corpus, but beginning anywhere."""
        text, size = self._texts[held_out], sequence_length + 1
        drawn = np.random.PCG64([peer_seed, int(held_out), block]).random_raw(count)
        starts = (drawn % np.uint64(len(text) - size)).astype(np.int64)
        windows: Windows = text[starts[:, None] + np.arange(size)].astype(np.int64)
        return windows

    def describe(self) -> str:
        """Which text this machine has: others have another Python."""
        digest = blake3(self._texts[False].tobytes() + self._texts[True].tobytes()).hexdigest(8)
        train, held_out = (len(self._texts[kind]) / 1e6 for kind in (False, True))
        return f"{train:.1f} MB to learn, {held_out:.1f} MB held out, BLAKE3 {digest}"


@cache
def library_text() -> LibraryText:
    """Read once per process."""
    return LibraryText()


TASKS: dict[str, type[TinyGPT]] = {"corpus": Corpus, "library": Library}


def make_task(data: str, seed: int) -> TinyGPT:
    return TASKS[data](seed=seed, options=TinyGPTOptions.model_validate(MODEL))


def batches(task: TinyGPT, seed: int, rank: int, batch_size: int) -> Iterator[Batch]:
    """Endless, different for every seed and rank, the same for every arm."""
    number = 0
    while True:
        tokens: torch.Tensor = task.samples(Block(seed=1000 * (seed + 1) + rank, number=number))["tokens"]
        yield from ({"tokens": tokens[first : first + batch_size]} for first in range(0, len(tokens), batch_size))
        number += 1
