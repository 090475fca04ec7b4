"""The loss on held-out data, as often as a gossip run needs it."""

from __future__ import annotations

import torch

from collab_core.errors import CollabError, HubError
from collab_core.memory import is_out_of_memory
from collab_core.run.settings import RunSettings
from collab_core.telemetry import EventLog
from collab_trainer.batches import AWAY
from collab_trainer.task import Task


class HeldOut:
    """Measures every round if that decides when the run is over, otherwise as often as the run file says."""

    def __init__(self, task: Task, settings: RunSettings, events: EventLog) -> None:
        self._task, self._events = task, events
        self._has_failed = self._is_away = False
        self._every = 1 if settings.gossip.stop == "converged" else settings.checkpoints.evaluate

    def is_due(self, num_rounds: int) -> bool:
        """Whether to measure after so many rounds."""
        return self._has_failed or (self._every > 0 and num_rounds % self._every == 0)

    def measure(self, model: torch.nn.Module, epoch: int, training_loss: float | None) -> float | None:
        """The loss now, or that of training where it cannot be measured; None if data for it is away."""
        if self._has_failed:
            return training_loss
        try:
            loss = self._task.evaluate(model)
        except Exception as error:  # noqa: BLE001 - a task's own code; mostly it needs data that is not here
            reason = error.message if isinstance(error, CollabError) else f"{type(error).__name__}: {error}"
            if not self._is_away:
                self._events.write("evaluation_failed", epoch=epoch, reason=reason)
            self._is_away = is_out_of_memory(error) or (isinstance(error, HubError) and error.code in AWAY)
            self._has_failed = not self._is_away
            return training_loss if self._has_failed else None  # the next time it may work again
        self._is_away = False
        self._events.write("evaluated", epoch=epoch, held_out_loss=loss)
        return loss
