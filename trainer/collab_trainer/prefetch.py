"""Data workers: batches made ahead in threads, each with a stream of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from blake3 import blake3

from collab_trainer.task import Batch, Task


def peer_seed(*parts: str | int) -> int:
    """A seed that differs per peer, worker and start."""
    return int.from_bytes(blake3("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


class Batches:
    """Endless batches; with workers, made in the background."""

    def __init__(self, task: Task, *, seed: int, batch_size: int, num_workers: int) -> None:
        self._stop = threading.Event()
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=2 * max(1, num_workers))
        self._direct: Iterator[Batch] | None = None
        if num_workers == 0:
            self._direct = task.batches(seed=seed, batch_size=batch_size)
        for worker in range(num_workers):
            batches = task.batches(seed=peer_seed(seed, worker), batch_size=batch_size)
            threading.Thread(target=self._fill, args=(batches,), name=f"collab-data-{worker}", daemon=True).start()

    def _fill(self, batches: Iterator[Batch]) -> None:
        try:
            for batch in batches:
                while not self._stop.is_set():
                    try:
                        self._queue.put(batch, timeout=0.2)
                        break
                    except queue.Full:
                        continue
                if self._stop.is_set():
                    return
            self._queue.put(RuntimeError("the task's batches came to an end, but they must be endless"))
        except Exception as error:  # noqa: BLE001 - it belongs to the trainer's thread, which raises it
            self._queue.put(error)

    def __next__(self) -> Batch:
        item = next(self._direct) if self._direct is not None else self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
