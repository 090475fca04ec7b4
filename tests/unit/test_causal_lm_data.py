"""causal-lm's data: each document once per pass for one peer, across restarts; peers differ; held-out stays out."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from causal_lm import task, word_tokenizer, write_texts

from collab_core.telemetry import EventLog
from collab_trainer.batches import Batches
from collab_trainer.causal_lm import CausalLM
from collab_trainer.causal_lm.blocks import DocumentBlocks
from collab_trainer.causal_lm.documents import is_held_out
from collab_trainer.causal_lm.packing import IGNORED, pack
from collab_trainer.causal_lm.shuffle import Shuffle
from collab_trainer.causal_lm.task import MIN_BLOCK_CHARS
from collab_trainer.causal_lm.tokenizer import ByteTokenizer
from collab_trainer.data_journal import DataJournal

ONE_IN = 8


@pytest.fixture
def documents(tmp_path: Path) -> set[str]:
    return write_texts(tmp_path / "data")


@pytest.fixture
def made(tmp_path: Path, documents: set[str], monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setattr("collab_trainer.causal_lm.task.MIN_BLOCK_CHARS", 500)  # some fifty blocks in a pass
    monkeypatch.setattr("collab_trainer.causal_lm.task.BLOCK_CHARS_PER_TOKEN", 1)
    return task(tmp_path / "data", {"cache_dir": tmp_path / "cache"})


def take_until(blocks: DocumentBlocks, num_documents: int) -> list[str]:
    """So many documents, or a few more: a block may end in the next pass."""
    seen: list[str] = []
    while len(seen) < num_documents:
        seen += next(blocks)
    return seen


def trained_on(documents: set[str]) -> set[str]:
    return {document for document in documents if not is_held_out(document, ONE_IN)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097])
def test_a_shuffle_has_every_number_once(size: int) -> None:
    assert sorted(Shuffle(size, "key")[index] for index in range(size)) == list(range(size))


def test_a_shuffle_depends_on_its_key_alone_and_never_changes() -> None:
    """Pinned: a peer that updates Collab in the middle of a pass must go on in the same order."""
    shuffle = Shuffle(1000, "7/0/0")
    assert [shuffle[index] for index in range(6)] == [365, 439, 191, 416, 799, 275]
    orders = {tuple(Shuffle(1000, f"{seed}/0/0")[index] for index in range(20)) for seed in range(50)}
    assert len(orders) == 50
    with pytest.raises(IndexError):
        shuffle[1000]


def test_a_shuffle_leaves_nothing_near_its_place() -> None:
    shuffle = Shuffle(10_000, "key")
    moved = [abs(shuffle[index] - index) for index in range(10_000)]
    assert sum(moved) / len(moved) == pytest.approx(10_000 / 3, rel=0.05)


def test_a_pass_shows_every_document_once_and_none_that_is_held_out(made: CausalLM, documents: set[str]) -> None:
    training = trained_on(documents)
    length = len(training)
    assert 20 < len(documents) - length < 150
    seen = take_until(made.blocks(seed=1, position=None), 2 * length)
    first, second = seen[:length], seen[length : 2 * length]
    assert set(first) == set(second) == training
    assert first != second, "the next pass has another order"


def test_after_any_kill_no_document_comes_twice_and_none_is_lost(made: CausalLM, documents: set[str]) -> None:
    whole = take_until(made.blocks(seed=3, position=None), len(trained_on(documents)))
    seen: list[str] = []
    position: dict[str, Any] | None = None
    for length in itertools.cycle((1, 3, 0, 7)):  # killed after so many blocks, the position of the last one on disk
        blocks = made.blocks(seed=3, position=position)
        for _ in range(length):
            seen += next(blocks)
        position = json.loads(json.dumps(blocks.position))
        if len(seen) >= len(whole):
            break
    assert seen[: len(whole)] == whole


def test_files_whose_names_look_like_patterns_are_read_and_each_once(tmp_path: Path) -> None:
    folder = tmp_path / "books [old]"
    folder.mkdir()
    for name, words in {"notes[1].txt": "with brackets", "notes1.txt": "without"}.items():
        (folder / name).write_text("\n\n".join(f"{words}, number {number}" for number in range(20)))
    made = task(folder, {"cache_dir": tmp_path / "cache"}, evaluation={"one_in": 10**6})
    seen = take_until(made.blocks(seed=1, position=None), 40)[:40]
    assert len(seen) == len(set(seen)) == 40


def test_two_peers_have_streams_of_their_own(made: CausalLM, documents: set[str]) -> None:
    length = len(trained_on(documents))
    first, second = (take_until(made.blocks(seed=seed, position=None), length)[:length] for seed in (1, 2))
    assert set(first) == set(second)
    in_place = sum(one == other for one, other in zip(first, second, strict=True))
    assert in_place < len(first) / 20


def test_workers_share_one_stream_and_restarts_go_on_from_it(made: CausalLM, tmp_path: Path) -> None:
    """Through the loop's own `Batches`, with three workers, ended and begun anew four times."""
    taken: list[str] = []
    lock = threading.Lock()
    pack_samples = made.samples

    def samples(block: list[str]) -> dict[str, torch.Tensor]:
        with lock:
            taken.extend(block)
        return pack_samples(block)

    made.samples = samples  # type: ignore[method-assign, assignment]
    for _ in range(4):
        journal = DataJournal(tmp_path / "data.json", "run", EventLog(tmp_path / "events.jsonl"))
        batches = Batches(made, journal, batch_size=4, num_workers=3)
        for _ in range(5):
            next(batches)
        batches.close()
        for worker in batches._workers:
            worker.join(30)
    assert len(taken) > 100
    assert len(taken) == len(set(taken)), "a document was used twice"


def test_sources_are_mixed_by_their_weights_and_the_mixture_survives_a_restart(tmp_path: Path) -> None:
    """Text counts, and not blocks: one source has long documents, the other is so small that it is read many times."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"a {number} {'long ' * 20_000}" for number in range(40)))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": f"b {number}"}) + "\n" for number in range(500)))
    sources = [{"files": ["a.txt"], "weight": 3.0}, {"files": ["b.jsonl"], "text_field": "body", "weight": 1.0}]
    made = task(tmp_path, {"cache_dir": tmp_path / "cache"}, data=sources)
    blocks = made.blocks(seed=5, position=None)
    seen: list[list[str]] = []
    for _ in range(200):
        if len(seen) % 50 == 49:
            blocks = made.blocks(seed=5, position=json.loads(json.dumps(blocks.position)))
        seen.append(next(blocks))
    num_chars = {kind: sum(len(one) for block in seen for one in block if one[0] == kind) for kind in "ab"}
    assert num_chars["b"] / sum(num_chars.values()) == pytest.approx(0.25, abs=0.02)
    assert min(sum(map(len, block)) for block in seen) >= MIN_BLOCK_CHARS, "a block is as long as it should be"
    undisturbed = made.blocks(seed=5, position=None)
    assert [next(undisturbed) for _ in range(200)] == seen
    others = {next(made.blocks(seed=seed, position=None))[0][0] for seed in range(20)}
    assert others == {"a", "b"}, "not all peers begin with the same source"


def test_a_source_without_text_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    (tmp_path / "full.txt").write_text("something to read")
    made = task(tmp_path, data=[{"files": ["empty.jsonl"]}, {"files": ["full.txt"]}], evaluation={"one_in": 10**6})
    blocks = made.blocks(seed=1, position=None)
    assert any(next(blocks) for _ in range(3))


def test_a_data_set_that_has_grown_begins_a_new_pass(made: CausalLM, tmp_path: Path) -> None:
    blocks = made.blocks(seed=1, position=None)
    next(blocks)
    old = blocks.position
    (tmp_path / "data" / "more.txt").write_text("something new")
    grown = task(tmp_path / "data", {"cache_dir": tmp_path / "cache"}).blocks(seed=1, position=old)
    assert grown.position["sources"] == [{"size": 601, "pass": 1, "index": 0}]
    assert grown.position["given"] == old["given"]


def test_text_json_lines_and_parquet_give_the_same_documents(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "paragraphs.md").write_text("\n\n".join(texts))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text, "more": 1}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": range(40)}), tmp_path / "rows.parquet")
    found = []
    for source in (
        {"files": ["lines.txt"], "documents": "line"},
        {"files": ["paragraphs.md"]},
        {"files": ["rows.jsonl"]},
        {"files": ["*.parquet"]},
    ):
        made = task(tmp_path, data=[source], evaluation={"one_in": 1_000_000})
        found.append(sorted(take_until(made.blocks(seed=1, position=None), 40)[:40]))
    assert found == [sorted(texts)] * 4
    whole = task(tmp_path, data=[{"files": ["lines.txt"], "documents": "file"}], evaluation={"one_in": 1_000_000})
    assert set(next(whole.blocks(seed=1, position=None))) == {"\n".join(texts) + "\n"}


def test_files_outside_the_data_folder_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    made = task(tmp_path / "data", data=[{"files": ["**/*.txt"]}], evaluation={"one_in": 1_000_000})
    assert set(next(made.blocks(seed=1, position=None))) == {"mine"}


# --- rows ---


def test_documents_are_packed_with_an_end_after_each() -> None:
    rows = pack(["ab", "", "cde", "f"], ByteTokenizer(), 4)
    assert rows.tolist() == [[97, 98, 256, 99], [100, 101, 256, 102]]
    assert rows.dtype == torch.int64


def test_less_than_a_row_is_one_row_that_ends_early_and_nothing_is_no_row() -> None:
    assert pack(["ab"], ByteTokenizer(), 6).tolist() == [[97, 98, 256, IGNORED, IGNORED, IGNORED]]
    assert pack([], ByteTokenizer(), 6).shape == (0, 6)
    assert pack([""], ByteTokenizer(), 6).shape == (0, 6)


def test_the_loss_leaves_out_what_is_no_token(tmp_path: Path) -> None:
    made = task()
    model = made.build_model()
    whole = pack(["abcd"], ByteTokenizer(), 5)
    padded = pack(["abcd"], ByteTokenizer(), 33)
    assert float(made.loss(model, {"tokens": whole}).detach()) == pytest.approx(
        float(made.loss(model, {"tokens": padded}).detach()), rel=1e-5
    )


# --- evaluation ---


def test_evaluation_is_on_held_out_documents_only_and_the_same_for_everyone(
    made: CausalLM, tmp_path: Path, documents: set[str]
) -> None:
    text = made.tokenizer.decode([int(token) for token in made._evaluation_rows.flatten()])
    numbers = {document.split(":")[0] for document in documents if f"{document.split(':')[0]}:" in text}
    held_out = {document.split(":")[0] for document in documents if is_held_out(document, ONE_IN)}
    assert len(numbers) > 5
    assert numbers <= held_out
    model = made.build_model()
    other = task(tmp_path / "data", {"cache_dir": tmp_path / "other"})
    assert made.evaluate(model) == other.evaluate(model)
    assert model.training


def test_evaluation_may_have_data_of_its_own(tmp_path: Path, documents: set[str]) -> None:
    (tmp_path / "test.txt").write_text("\n\n".join(f"test {number}" for number in range(50)))
    made = task(tmp_path, data=[{"files": ["data/*.txt"]}], evaluation={"data": [{"files": ["test.txt"]}]})
    text = made.tokenizer.decode([int(token) for token in made._evaluation_rows.flatten()])
    assert "test 3" in text
    assert "document" not in text
    seen = take_until(made.blocks(seed=1, position=None), len(documents))
    assert set(seen) == documents, "nothing is held out of the training data"


def test_it_learns_with_words_of_its_own_tokenizer(tmp_path: Path, documents: set[str]) -> None:
    made = task(
        tmp_path / "data",
        {"assets": {"tokenizer.json": word_tokenizer()}},
        tokenizer={"file": "tokenizer.json", "end_of_document": "<end>"},
        gradient_checkpointing=True,
    )
    model = made.build_model()
    assert model.is_gradient_checkpointing  # type: ignore[attr-defined]
    before = made.evaluate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    blocks = made.blocks(seed=1, position=None)
    for _ in range(20):
        loss = made.loss(model, {"tokens": made.samples(next(blocks))["tokens"][:16]})
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert made.evaluate(model) < before - 2
    assert made.sample(model) == made.sample(model)
    assert made.floor is None
