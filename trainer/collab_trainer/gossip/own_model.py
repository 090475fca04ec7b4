"""A model of our own: trained step by step, moved by every exchange, and never anything that is not finite."""

from __future__ import annotations

import torch

from collab_core.gossip import Change, moved
from collab_core.run.settings import OptimizerSettings
from collab_core.state.layout import Layout
from collab_core.telemetry import EventLog
from collab_trainer.work import LocalSteps


class OwnModel:
    """Belongs to the thread that trains.

    Args:
        model: on its device.
        layout: of its values.
        settings: of its steps.
        events: told if training broke it.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, settings: OptimizerSettings, events: EventLog) -> None:
        self.model, self.layout = model, layout
        self.steps = LocalSteps(model, layout, settings)
        self._settings, self._events = settings, events
        self._good = layout.read(model)
        """As it was when it was last looked at, with every exchange since."""
        self.epoch = 0
        """The round: ours, from that of whoever gave us our first model."""

    def begin(self) -> None:
        """A new round of training."""
        self.model.train()
        self.steps.begin(self.epoch)

    def values(self) -> torch.Tensor:
        """A copy of it as it is; if training made it something that is not finite, as it was."""
        values = self.layout.read(self.model)
        if not bool(torch.isfinite(values).all()):
            self._events.write("gradient_dropped", epoch=self.epoch, reason="it is not finite")
            values = self._good
            self.layout.write(self.model, values)
            self.steps = LocalSteps(
                self.model, self.layout, self._settings
            )  # whatever it remembers may not be finite either
            self.steps.begin(self.epoch)
        self._good = values.clone()
        return values

    def become(self, values: torch.Tensor, epoch: int) -> None:
        """Another model, whole."""
        self._good, self.epoch = values.clone(), epoch
        self.layout.write(self.model, values)

    def take(self, change: Change) -> None:
        """The average in place of what we brought; what we learnt since stays."""
        self._good = self._moved(self._good, change)
        self.layout.write(self.model, self._moved(self.layout.read(self.model), change))

    def move(self, rounds: int, last: int) -> None:
        """Into the round of an average. The last one of the run, if it has one, is not reached by meeting others."""
        epoch = max(0, self.epoch + rounds)
        self.epoch = min(epoch, max(self.epoch, last - 1)) if last else epoch

    def _moved(self, values: torch.Tensor, change: Change) -> torch.Tensor:
        result = moved(values, change.old, change.average)
        if result is not change.average:  # a running variance would not bear a difference: buffers are averaged
            result[self.layout.num_params :] = change.average[self.layout.num_params :]
        return result
