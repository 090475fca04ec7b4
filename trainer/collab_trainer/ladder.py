"""Batches in pieces that fit into memory: when it runs out, half as many rows at once, added up to the same batch."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from collab_core.errors import Code, TaskError
from collab_core.memory import is_out_of_memory
from collab_core.telemetry import EventLog
from collab_trainer.batches import num_samples
from collab_trainer.device import release
from collab_trainer.task import Batch


class Ladder:
    """How many rows go through the model at once.

    Args:
        device: whose memory it is about.
        events: told of every step down.
    """

    def __init__(self, device: torch.device, events: EventLog) -> None:
        self._device, self._events = device, events
        self.max_rows: int | None = None
        """None: whole batches, as long as they fit."""

    def climb(self, batch: Batch, one_pass: Callable[[Batch], None]) -> bool:
        """Take a batch through the model, piece by piece.

        Args:
            batch: rows on the CPU.
            one_pass: forward and backward of some of its rows.

        Returns:
            False if memory ran out: then what the passes of this step left behind is of no use, and must be forgotten
            before the step is tried again.

        Raises:
            TaskError: OUT_OF_MEMORY, when not even one row fits.
        """
        total = num_samples(batch)
        rows = min(self.max_rows or total, total)
        for start in range(0, total, rows):
            piece: Batch = {}
            failure = ""
            try:
                piece = {name: values[start : start + rows].to(self._device) for name, values in batch.items()}
                one_pass(piece)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = " ".join(str(error).split())[:200] or type(error).__name__
            if failure:  # out here, where the exception no longer holds on to what did not fit
                del piece
                self._step_down(rows, failure)
                return False
        return True

    def _step_down(self, rows: int, reason: str) -> None:
        gc.collect()
        release(self._device)
        if rows == 1:
            raise TaskError(
                Code.OUT_OF_MEMORY,
                f"Memory ran out with a single sample ({reason}).",
                fix="End other programs that use it, or join from a machine with more; `collab doctor` says how much.",
            )
        self.max_rows = (rows + 1) // 2
        self._events.write("out_of_memory", rows=rows, next_rows=self.max_rows, reason=reason)
