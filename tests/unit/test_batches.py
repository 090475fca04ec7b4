"""No sample twice: across batches, data workers, restarts and kills; and every peer has its own stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from collab_cli.failures import errors_in_words
from collab_core.errors import Code, HubError, TaskError
from collab_core.run.settings import TaskSettings
from collab_core.telemetry import EventLog
from collab_trainer import batches as batches_module
from collab_trainer import load_task
from collab_trainer.batches import Batches
from collab_trainer.data_journal import DataJournal
from collab_trainer.task import Batch, Block, NumberedBlocks

BLOCK = 10


class Counting:
    """The data half of a task: sample n of a peer is the pair (its seed, n), so a repetition cannot hide."""

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        numbers = torch.arange(BLOCK) + BLOCK * block.number
        return {"seed": torch.full((BLOCK,), block.seed), "number": numbers}


class Empty(Counting):
    def samples(self, block: Block) -> Batch:
        return {"number": torch.empty(0)}


class Broken(Counting):
    def samples(self, block: Block) -> Batch:
        raise ZeroDivisionError("the task's own fault")


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path / "events.jsonl")
    yield log
    log.close()


def start(path: Path, events: EventLog, *, task: Any = None, batch_size: int = 7, num_workers: int = 0) -> Batches:
    journal = DataJournal(path / "data.json", "run", events)
    return Batches(task or Counting(), journal, batch_size=batch_size, num_workers=num_workers)


def take(batches: Batches, num_batches: int) -> list[tuple[int, int]]:
    taken = []
    for _ in range(num_batches):
        batch = next(batches)
        assert len(batch["seed"]) == len(batch["number"])
        taken += list(zip(batch["seed"].tolist(), batch["number"].tolist(), strict=True))
    batches.close()
    return taken


def test_a_batch_has_its_size_whatever_the_size_of_a_block(tmp_path: Path, events: EventLog) -> None:
    for batch_size in (1, 7, 10, 33):
        assert len(next(start(tmp_path, events, batch_size=batch_size))["number"]) == batch_size


def test_no_sample_comes_twice_across_restarts_and_data_workers(tmp_path: Path, events: EventLog) -> None:
    """Starts are cut off in the middle, as by kill -9: nothing is told to the journal at the end."""
    seen: list[tuple[int, int]] = []
    for num_workers in (0, 2, 1, 3, 0):
        seen += take(start(tmp_path, events, num_workers=num_workers), 20)
    assert len(seen) == len(set(seen)) == 5 * 20 * 7
    assert len({seed for seed, _ in seen}) == 1


def test_a_restart_skips_no_more_than_what_was_in_flight(tmp_path: Path, events: EventLog) -> None:
    first = take(start(tmp_path, events, num_workers=0), 3)
    then = take(start(tmp_path, events, num_workers=0), 1)
    assert then[0][1] - first[-1][1] <= BLOCK


def test_two_peers_have_streams_of_their_own(tmp_path: Path, events: EventLog) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    task = load_task(TaskSettings())
    one, two = (next(start(tmp_path / name, events, task=task, batch_size=64))["tokens"] for name in ("one", "two"))
    assert not {bytes(row) for row in one.byte().numpy()} & {bytes(row) for row in two.byte().numpy()}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": "run", "seed": -1, "position": null}'])
def test_a_damaged_journal_begins_a_new_stream(tmp_path: Path, events: EventLog, content: bytes) -> None:
    before = take(start(tmp_path, events), 1)
    (tmp_path / "data.json").write_bytes(content)
    assert not set(before) & set(take(start(tmp_path, events), 1))


def test_another_run_in_the_same_folder_begins_a_new_stream(tmp_path: Path, events: EventLog) -> None:
    path = tmp_path / "data.json"
    first = DataJournal(path, "run", events)
    first.write({"next": 5})
    assert DataJournal(path, "run", events).position == {"next": 5}
    other = DataJournal(path, "another run", events)
    assert other.position is None
    assert other.seed != first.seed


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, events: EventLog) -> None:
    folder = tmp_path / "data.json"
    batches = start(tmp_path, events)
    folder.unlink()
    folder.mkdir()  # a file cannot replace it: the same answer a full disk gives, and root gets it too
    next(batches), next(batches), next(batches)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in told] == ["data_position_lost"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_without_a_single_sample_ends_in_words(tmp_path: Path, events: EventLog, num_workers: int) -> None:
    batches = start(tmp_path, events, task=Empty(), num_workers=num_workers)
    with closing(batches), pytest.raises(TaskError) as caught:
        next(batches)
    assert caught.value.code is Code.NO_DATA


def test_a_workers_error_is_raised_where_the_batch_is_wanted(tmp_path: Path, events: EventLog) -> None:
    batches = start(tmp_path, events, task=Broken(), num_workers=2)
    with closing(batches), pytest.raises(ZeroDivisionError, match="own fault"):
        next(batches)


class Stuck(Counting):
    def samples(self, block: Block) -> Batch:
        time.sleep(3)
        return super().samples(block)


def test_workers_that_wait_for_their_source_hold_nobody_up(tmp_path: Path, events: EventLog) -> None:
    batches = start(tmp_path, events, task=Stuck(), num_workers=8)
    begun = time.monotonic()
    batches.close()
    assert time.monotonic() - begun < 2.5


class Away(Counting):
    """Its source breaks off after two blocks, and is back when it is opened for the third time."""

    num_opened = 0

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> NumberedBlocks:
        self.num_opened += 1
        if self.num_opened == 2:
            raise HubError(Code.HUB_UNREACHABLE, "The Hub cannot be reached.", fix="Wait.")
        return Breaking(seed, position) if self.num_opened == 1 else NumberedBlocks(seed, position)


class Breaking(NumberedBlocks):
    def __next__(self) -> Block:
        block = super().__next__()
        if block.number == 2:
            raise HubError(Code.HUB_BROKEN, "The connection broke.", fix="Try again.")
        return block


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_that_is_away_is_waited_for_and_nothing_of_it_is_missed(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(batches_module, "PAUSE_S", 0.01)
    taken = take(start(tmp_path, events, task=Away(), batch_size=BLOCK, num_workers=num_workers), 4)
    assert [number for _, number in taken] == list(range(4 * BLOCK))
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["reason"]) for event in told] == [("data_away", "The connection broke.")]


class Slow(Counting):
    """What reads its source sleeps and tries again by itself, as the Hub's libraries do."""

    def samples(self, block: Block) -> Batch:
        time.sleep(60)
        return super().samples(block)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_is_asked_to_stop_does_not_wait_for_what_its_source_waits_for(
    tmp_path: Path, events: EventLog, num_workers: int
) -> None:
    stop = threading.Event()
    batches = Batches(
        Slow(), DataJournal(tmp_path / "data.json", "run", events), batch_size=1, num_workers=num_workers, stop=stop
    )
    threading.Timer(0.2, stop.set).start()
    begun = time.monotonic()
    with closing(batches), pytest.raises(KeyboardInterrupt):
        next(batches)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_is_asked_to_stop_does_not_wait_for_a_source_and_ends_as_somebody_who_was_stopped(
    tmp_path: Path, events: EventLog, num_workers: int
) -> None:
    stop = threading.Event()
    journal = DataJournal(tmp_path / "data.json", "run", events)
    batches = Batches(Away(), journal, batch_size=BLOCK, num_workers=num_workers, stop=stop)
    next(batches), next(batches)
    threading.Timer(0.2, stop.set).start()
    with closing(batches), pytest.raises(typer.Exit) as ended, errors_in_words():
        next(batches)
    assert ended.value.exit_code == 0
