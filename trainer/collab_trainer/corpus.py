"""The corpus shipped with Collab: generated lines of English and small sums, endless, nothing to download.

A line is a sentence ("the quiet otter reads a small map.") or a sum ("17+25=42"), and ends in a newline. Lines are
drawn independently: the kind with a fixed probability, then uniformly among the lines of that kind. Bytes are the
tokens, so the vocabulary is 256. One line in sixteen, chosen by its own hash, is held out: training never shows it.

How low can the loss get? Every line has exactly one derivation and lines are independent, so the text is a renewal
process and its entropy rate is exact: `H(line) / E[bytes per line]` nats per byte. The training lines, the held-out
lines and the whole grammar have rates of their own. The yardstick for a loss measured on held-out lines is the whole
grammar: a model cannot know which lines the hash kept from it, so the held-out rate (fewer lines, far lower) is out of
its reach, and the training rate (the grammar less a sixteenth) would reward it for learning lines by heart.

A loss is measured on windows, and there the rate is only a guide: a window gives its first byte away, and cuts its last
line, whose later bytes are the easy ones. On windows of 129 bytes this adds some 4 %, and which lines the windows
happen to hold moves it by another 2 %. `Lines.ideal_loss` is exact for given windows; a task reports it as its floor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt
from blake3 import blake3

SUM_PROBABILITY = 0.25
LARGEST_SUMMAND = 99
HELD_OUT_ONE_IN = 16

# The words that may stand in each place of a sentence, and how many of them a corpus uses; its seed decides which.
SLOTS = (
    ("brave,clever,curious,gentle,hungry,kind,lazy,merry,old,proud,quiet,shy,sleepy,swift,tiny,wise", 10),
    ("badger,bear,cat,crab,crow,deer,dog,fox,goose,hare,heron,lynx,mole,mouse,otter,owl,seal,toad,wolf,wren", 10),
    ("borrows,brings,draws,finds,folds,hides,keeps,likes,paints,reads,sells,wants", 8),
    (
        "a broken cup,a long letter,a new song,a paper boat,a red kite,a silver spoon,a small map,a warm coat,"
        "an empty jar,an old clock,some fresh bread,the blue door,the green lamp,the last apple,the round stone",
        10,
    ),
)

DRAW_BITS = 32
Windows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A finite set of lines with its distribution."""

    sums: list[bytes]
    """Sorted."""
    sentences: list[bytes]
    """Sorted."""

    def probability(self, prefix: bytes) -> float:
        """The probability that a line starts with `prefix`; of the line itself, if `prefix` is a whole line."""
        return sum(
            share * (bisect_left(lines, prefix + b"\xff") - bisect_left(lines, prefix)) / len(lines)
            for share, lines in ((SUM_PROBABILITY, self.sums), (1 - SUM_PROBABILITY, self.sentences))
        )

    @cached_property
    def table(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes of the sums, then of the sentences, one row each, padded with 0; and how many bytes each has."""
        text = [*self.sums, *self.sentences]
        num_bytes = np.array([len(line) for line in text])
        return np.array(text, dtype=np.bytes_).view(np.uint8).reshape(len(text), -1), num_bytes

    @property
    def entropy_rate(self) -> float:
        """Nats per byte: the entropy of one line over its expected length (renewal-reward theorem)."""
        entropy = expected_bytes = 0.0
        for share, lines in ((SUM_PROBABILITY, self.sums), (1 - SUM_PROBABILITY, self.sentences)):
            entropy += share * math.log(len(lines) / share)
            expected_bytes += share * sum(map(len, lines)) / len(lines)
        return entropy / expected_bytes

    def ideal_loss(self, windows: Windows) -> float:
        """Mean nats per predicted byte of a model that knows these lines and their distribution, and nothing else.

        Within a line the probabilities of the bytes multiply to that of the line (or of its start, where the window
        cuts it), so no model has to be built. The first byte of a window is given, hence not counted.
        """
        nats = 0.0
        for window in windows.astype(np.uint8):
            text = window.tobytes()
            nats -= sum(math.log(self.probability(piece)) for piece in text.splitlines(keepends=True))
            nats += math.log(self.probability(text[:1]))
        return nats / windows[:, 1:].size


class Corpus:
    """One corpus: the grammar with the vocabulary that `seed` selects.

    Args:
        seed: selects the words. The same seed gives the same corpus on every machine.

    Attributes:
        whole: all lines of the grammar, the yardstick for losses.
        train: the lines a trainer may see.
        held_out: the other lines, for evaluation.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        chosen = [_choose_words(seed, words.split(","), num_words) for words, num_words in SLOTS]
        sentences = sorted(f"the {' '.join(words)}.\n".encode() for words in product(*chosen))
        summands = range(LARGEST_SUMMAND + 1)
        sums = sorted(b"%d+%d=%d\n" % (a, b, a + b) for a in summands for b in summands)
        held_out = {line for line in (*sums, *sentences) if is_held_out(line)}

        self.whole = Lines(sums=sums, sentences=sentences)
        self.train = Lines(
            sums=[line for line in sums if line not in held_out],
            sentences=[line for line in sentences if line not in held_out],
        )
        self.held_out = Lines(
            sums=[line for line in sums if line in held_out],
            sentences=[line for line in sentences if line in held_out],
        )

    def stream(self, peer_seed: int, held_out: bool = False) -> Iterator[bytes]:
        """Endless lines; another `peer_seed` gives other lines, the same one the same."""
        lines = self.held_out if held_out else self.train
        table = [*lines.sums, *lines.sentences]
        bits = self._bits(peer_seed, held_out)
        while True:
            yield from (table[i] for i in _draw(bits, lines, 256))

    def windows(
        self, peer_seed: int, block: int, *, count: int, sequence_length: int, held_out: bool = False
    ) -> Windows:
        """`count` windows of `sequence_length + 1` bytes; every peer seed and every block number gives others.

        Each window starts at the beginning of a line, is filled with the lines that follow and cut at the end.
        """
        lines = self.held_out if held_out else self.train
        table, num_bytes = lines.table
        size = sequence_length + 1
        lines_per_window = -(-size // int(num_bytes.min()))  # enough, however short the lines drawn
        drawn = _draw(self._bits(peer_seed, held_out, block), lines, count * lines_per_window)
        joined = table[drawn][np.arange(table.shape[1]) < num_bytes[drawn, None]]
        window_bytes = num_bytes[drawn].reshape(count, lines_per_window).sum(axis=1)
        starts = np.cumsum(window_bytes) - window_bytes
        windows: Windows = joined[starts[:, None] + np.arange(size)].astype(np.int64)
        return windows

    def _bits(self, peer_seed: int, held_out: bool, *block: int) -> np.random.PCG64:
        return np.random.PCG64([self.seed, peer_seed, int(held_out), *block])


def is_held_out(line: bytes) -> bool:
    """Whether a line belongs to evaluation. Decided by the line alone, so every peer agrees without being told."""
    return int.from_bytes(blake3(line).digest(4), "little") % HELD_OUT_ONE_IN == 0


def _choose_words(seed: int, words: list[str], count: int) -> list[str]:
    """`count` of the words, in an order given by hashes: unlike numpy's shuffles it never changes between versions."""
    return sorted(words, key=lambda word: blake3(f"{seed}/{word}".encode()).digest())[:count]


def _draw(bits: np.random.PCG64, lines: Lines, count: int) -> npt.NDArray[np.int64]:
    """Indices into the sums followed by the sentences.

    Made of raw bits, whose stream numpy guarantees; `Generator.integers` may change from one version to the next.
    """
    raw = bits.random_raw(count)
    kind, position = raw >> np.uint64(DRAW_BITS), raw & np.uint64(2**DRAW_BITS - 1)
    is_sum = kind < np.uint64(int(SUM_PROBABILITY * 2**DRAW_BITS))
    num_lines = np.where(is_sum, np.uint64(len(lines.sums)), np.uint64(len(lines.sentences)))
    index: npt.NDArray[np.int64] = ((position * num_lines) >> np.uint64(DRAW_BITS)).astype(np.int64)
    index[~is_sum] += len(lines.sums)
    return index
