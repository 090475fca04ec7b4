"""The state a run begins with, built from its seed; and its root, which the manifest pins."""

from __future__ import annotations

import torch

from collab_core.run.settings import RunSettings
from collab_core.state.layout import Layout
from collab_core.state.replica import Replica
from collab_trainer.task import load_task


def new_replica(settings: RunSettings, model: torch.nn.Module) -> Replica:
    """A replica at epoch 0 with the model's parameters."""
    layout = Layout.of(model)
    return Replica(layout, settings.optimizer, layout.read(model))


def initial_root(settings: RunSettings) -> str:
    """Root of the initial state of a run."""
    return new_replica(settings, load_task(settings.task).build_model()).freeze().root
