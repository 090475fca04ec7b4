"""Has the model write something now and then, for people to see how it comes along; off everybody's way."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch

from collab_core.errors import CollabError
from collab_core.state.snapshot import Snapshot
from collab_core.telemetry import EventLog

MIN_PAUSE_S = 15.0
PAUSE_FACTOR = 20  # at most a twentieth of a core
CLOSING_S = 1.0

Write = Callable[[Mapping[str, torch.Tensor]], str]


class Sampler:
    """One thread that writes with a state it was given. What it cannot do, nobody waits for.

    Args:
        write: what a state has to say.
        events: where it is told.
    """

    def __init__(self, write: Write, events: EventLog) -> None:
        self._write, self._events = write, events
        self._waiting: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._ready_at = 0.0
        self._thread = threading.Thread(target=self._run, name="collab-sampler", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Write with this state, unless the last time was a moment ago: then it is not even kept, as it is large."""
        if time.monotonic() >= self._ready_at:
            self._ready_at = math.inf
            self._waiting.put(snapshot)

    def _run(self) -> None:
        while (snapshot := self._waiting.get()) is not None:
            start = time.monotonic()
            try:
                text = self._write(snapshot.tensors)
            except Exception as error:  # noqa: BLE001 - a task's own code
                reason = error.message if isinstance(error, CollabError) else f"{type(error).__name__}: {error}"
                self._events.write("sampling_failed", epoch=snapshot.epoch, reason=reason)
                return
            end = time.monotonic()
            self._events.write("sampled", epoch=snapshot.epoch, text=text, seconds=round(end - start, 3))
            snapshot = None
            self._ready_at = end + max(MIN_PAUSE_S, PAUSE_FACTOR * (end - start))

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(CLOSING_S)
