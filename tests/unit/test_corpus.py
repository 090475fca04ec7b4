"""The built-in corpus: disjoint parts, exact entropies, streams that every peer can repeat."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest

from collab_trainer.corpus import HELD_OUT_ONE_IN, Corpus, is_held_out


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(0)


def lines_of(windows: np.ndarray) -> list[bytes]:
    """The lines that the windows hold whole: all but the last of each, which may be cut."""
    return [line for row in windows.astype(np.uint8) for line in row.tobytes().splitlines(keepends=True)[:-1]]


def test_training_and_held_out_lines_are_disjoint_and_make_up_the_grammar(corpus: Corpus) -> None:
    train = {*corpus.train.sums, *corpus.train.sentences}
    held_out = {*corpus.held_out.sums, *corpus.held_out.sentences}
    assert not train & held_out
    assert train | held_out == {*corpus.whole.sums, *corpus.whole.sentences}
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(1 / HELD_OUT_ONE_IN, rel=0.1)


def test_every_line_has_one_derivation(corpus: Corpus) -> None:
    lines = [*corpus.whole.sums, *corpus.whole.sentences]
    assert len(set(lines)) == len(lines)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)


@pytest.mark.parametrize("held_out", [False, True])
def test_streams_and_windows_show_only_their_own_part(corpus: Corpus, held_out: bool) -> None:
    windows = corpus.windows(5, 0, count=200, sequence_length=128, held_out=held_out)
    shown = [*islice(corpus.stream(5, held_out), 2000), *lines_of(windows)]
    assert {is_held_out(line) for line in shown} == {held_out}


@pytest.mark.parametrize("held_out", [False, True])
def test_entropy_rate_agrees_with_sampled_lines(corpus: Corpus, held_out: bool) -> None:
    part = corpus.held_out if held_out else corpus.train
    drawn = list(islice(corpus.stream(1, held_out), 50_000))
    nats = -sum(math.log(part.probability(line)) for line in drawn)
    assert nats / sum(map(len, drawn)) == pytest.approx(part.entropy_rate, rel=0.01)


def test_probabilities_of_all_lines_sum_to_one(corpus: Corpus) -> None:
    whole = corpus.whole
    assert sum(map(whole.probability, [*whole.sums, *whole.sentences])) == pytest.approx(1)
    assert whole.probability(b"") == pytest.approx(1)
    assert whole.probability(b"no line starts like this") == 0


def test_the_rates_are_ordered_by_how_much_they_presume(corpus: Corpus) -> None:
    assert corpus.held_out.entropy_rate < corpus.train.entropy_rate < corpus.whole.entropy_rate


def test_ideal_loss_nears_the_entropy_rate_as_windows_grow(corpus: Corpus) -> None:
    def ideal_loss(sequence_length: int) -> float:
        return corpus.train.ideal_loss(corpus.windows(1, 0, count=64, sequence_length=sequence_length))

    assert ideal_loss(8192) == pytest.approx(corpus.train.entropy_rate, rel=0.01)


def test_ideal_loss_is_the_mean_over_bytes_of_their_conditional_surprise(corpus: Corpus) -> None:
    window = corpus.windows(2, 0, count=1, sequence_length=40)
    text = window[0].astype(np.uint8).tobytes()
    surprises = []
    for i in range(1, len(text)):
        seen = text[text.rfind(b"\n", 0, i) + 1 : i]
        surprises.append(-math.log(corpus.whole.probability(seen + text[i : i + 1]) / corpus.whole.probability(seen)))
    assert corpus.whole.ideal_loss(window) == pytest.approx(sum(surprises) / 40)


def test_a_seed_repeats_its_stream_and_another_seed_has_another(corpus: Corpus) -> None:
    first, again, other = (list(islice(Corpus(0).stream(seed), 100)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_windows_start_at_the_beginning_of_a_line_and_hold_whole_lines_until_cut(corpus: Corpus) -> None:
    windows = corpus.windows(3, 0, count=64, sequence_length=128)
    assert windows.shape == (64, 129)
    assert windows.dtype == np.int64
    known = {*corpus.train.sums, *corpus.train.sentences}
    for row in windows.astype(np.uint8):
        *whole, cut = row.tobytes().splitlines(keepends=True)
        assert known.issuperset(whole)
        assert corpus.train.probability(cut) > 0


def test_windows_are_filled_even_when_every_line_is_short(corpus: Corpus) -> None:
    for length in (1, 5, 6, 1000):
        assert corpus.windows(0, 0, count=300, sequence_length=length).min() >= ord("\n")


def test_sums_are_right(corpus: Corpus) -> None:
    for line in corpus.whole.sums[::97]:
        left, right = line.decode().split("=")
        a, b = left.split("+")
        assert int(a) + int(b) == int(right)


def test_another_corpus_seed_has_other_words_and_the_same_seed_the_same() -> None:
    assert Corpus(1).whole.sentences == Corpus(1).whole.sentences
    assert Corpus(1).whole.sentences != Corpus(2).whole.sentences


def test_the_stream_never_changes_between_versions(corpus: Corpus) -> None:
    """Peers with other versions of numpy must see the same evaluation data; if this fails, every floor moves."""
    assert list(islice(corpus.stream(0, held_out=True), 3)) == [
        b"the wise badger borrows an old clock.\n",
        b"the brave crow borrows an empty jar.\n",
        b"the sleepy owl brings a warm coat.\n",
    ]
