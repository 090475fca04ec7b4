"""The state a run begins with; and what the organiser finds out about it before signing: its root, its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from collab_core.run import Prepared
from collab_core.run.settings import RunSettings
from collab_core.state.layout import Layout
from collab_core.state.replica import Replica
from collab_trainer.context import TaskContext
from collab_trainer.task import collect_assets, load_task


def new_replica(settings: RunSettings, model: torch.nn.Module) -> Replica:
    """A replica at epoch 0 with the model's parameters."""
    layout = Layout.of(model)
    return Replica(layout, settings.update, layout.read(model), settings.strategy.fragments)


def prepare(settings: RunSettings, run_dir: Path) -> Prepared:
    """Everything that a manifest pins besides the settings."""
    assets = collect_assets(settings.task, run_dir)
    task = load_task(settings.task, TaskContext(assets=assets, run_dir=run_dir))
    return Prepared(new_replica(settings, task.build_model()).freeze().root, assets)


def model_files(model: torch.nn.Module, assets: Mapping[str, bytes]) -> dict[str, bytes]:
    """What lies beside a model's weights so that `from_pretrained` loads them: the run's files, and a config."""
    config: Any = getattr(model, "config", None)
    if "config.json" in assets or not hasattr(config, "to_json_string"):
        return dict(assets)
    return {**assets, "config.json": config.to_json_string().encode()}
