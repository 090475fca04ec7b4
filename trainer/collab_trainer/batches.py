"""Batches for the training loop: blocks taken one by one, turned into samples by workers, each used once.

Where a peer stands in its data is on disk before the data is used. So after any end, kill -9 included, it goes on with
data it has not seen: at most the blocks in flight are skipped, none comes twice, whatever the number of workers.

A source that is away is waited for: it is away for all trainers at once, and the run should not end with it. Libraries
that read it may sleep and try again by themselves, so they never do that in the trainer's own thread.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch

from collab_core.errors import Code, HubError, TaskError
from collab_trainer.data_journal import DataJournal
from collab_trainer.task import Batch, Blocks, Task

MAX_EMPTY_BLOCKS = 1000  # in a row; then the data has nothing for us
POLL_S = 0.2
CLOSING_S = 1.0
AWAY = (Code.HUB_UNREACHABLE, Code.HUB_BROKEN)
PAUSE_S, MAX_PAUSES = 30.0, 120  # between two looks whether a source is back; an hour in all


class StoppedWaiting(KeyboardInterrupt):
    """We were asked to leave while a source of data was away: what a person did, and no error."""


class Batches:
    """Endless batches of `batch_size` samples; with workers, made in the background.

    Args:
        stop: once it is set, data that is not there yet is not waited for any more.
    """

    def __init__(
        self,
        task: Task,
        journal: DataJournal,
        *,
        batch_size: int,
        num_workers: int,
        stop: threading.Event | None = None,
    ) -> None:
        self._task, self._journal, self.batch_size = task, journal, batch_size
        self._position = journal.position
        self._blocks: Blocks | None = task.blocks(seed=journal.seed, position=journal.position)
        self._taking = threading.Lock()
        self._rows: Batch = {}
        self._asked_to_stop, self._stop = stop or threading.Event(), threading.Event()
        self._queue: queue.Queue[Batch | BaseException] | None = None
        if num_workers:
            self._queue = queue.Queue(maxsize=num_workers)
        self._workers = [
            threading.Thread(target=self._work, name=f"collab-data-{worker}", daemon=True)
            for worker in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def __next__(self) -> Batch:
        self._fill(self.batch_size)
        batch = {name: rows[: self.batch_size] for name, rows in self._rows.items()}
        self._rows = {name: rows[self.batch_size :] for name, rows in self._rows.items()}
        return batch

    def peek(self) -> Batch:
        """Some samples that are still to come, one at least."""
        self._fill(1)
        return self._rows

    def _fill(self, size: int) -> None:
        num_empty = 0
        while (num_rows := num_samples(self._rows)) < size:
            more = self._next_samples()
            num_empty = 0 if num_samples(more) else num_empty + 1
            if num_empty > MAX_EMPTY_BLOCKS:
                raise TaskError(
                    Code.NO_DATA,
                    f"The task's data gave no sample in {MAX_EMPTY_BLOCKS} blocks.",
                    fix="Look at the data: is there any, and is it long enough for one sample?",
                )
            self._rows = {name: torch.cat([self._rows[name], more[name]]) for name in more} if num_rows else more

    def close(self) -> None:
        """End the workers; one that waits for its source for long is not waited for."""
        self._stop.set()
        deadline = time.monotonic() + CLOSING_S  # of all of them
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _next_samples(self) -> Batch:
        made = self._queue or self._begin_one()
        while True:
            try:
                outcome = made.get(timeout=POLL_S)
            except queue.Empty:
                if self._asked_to_stop.is_set():
                    raise StoppedWaiting from None
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    def _begin_one(self) -> queue.Queue[Batch | BaseException]:
        """Without workers: a thread for the next block alone."""
        made: queue.Queue[Batch | BaseException] = queue.Queue()
        threading.Thread(target=lambda: made.put(self._outcome()), name="collab-data", daemon=True).start()
        return made

    def _outcome(self) -> Batch | BaseException:
        try:
            return self._make()
        except (Exception, StoppedWaiting) as error:  # noqa: BLE001 - it belongs to the trainer's thread, which raises it
            return error

    def _make(self) -> Batch:
        with self._taking:
            block = self._next_block()
        return self._task.samples(block)

    def _next_block(self) -> Any:
        num_pauses = 0
        while True:
            try:
                if self._blocks is None:
                    self._blocks = self._task.blocks(seed=self._journal.seed, position=self._position)
                block = next(self._blocks)
            except HubError as error:
                if error.code not in AWAY or num_pauses == MAX_PAUSES:
                    raise
                if num_pauses == 0:
                    self._journal.tell_away(error.message)
                if self._asked_to_stop.wait(PAUSE_S) or self._stop.is_set():
                    raise StoppedWaiting from error
                num_pauses += 1
                self._blocks = None
            else:
                self._position = self._blocks.position
                self._journal.write(self._position)
                return block

    def _work(self) -> None:
        while not self._stop.is_set():
            made = self._outcome()
            self._hand_over(made)
            if isinstance(made, BaseException):
                return

    def _hand_over(self, made: Batch | BaseException) -> None:
        assert self._queue is not None
        while not self._stop.is_set():
            try:
                self._queue.put(made, timeout=POLL_S)
                return
            except queue.Full:
                continue


def num_samples(batch: Batch) -> int:
    """How many rows a batch has."""
    return len(next(iter(batch.values()))) if batch else 0
