"""This peer's copy of the run's state: parameters, buffers, global optimizer state, epoch, history."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collab_core.errors import Code, StateError
from collab_core.run.settings import OptimizerSettings
from collab_core.state.layout import Layout
from collab_core.state.snapshot import Snapshot
from collab_core.update import Optimizer, UpdateStats

NO_PARENT = "0" * 64
MAX_HISTORY = 4096


class Replica:
    """The state, flat and on the CPU in float32. Everything that counts is in its root."""

    def __init__(self, layout: Layout, settings: OptimizerSettings, initial: torch.Tensor) -> None:
        self.layout = layout
        self.epoch = 0
        self.parent_root = NO_PARENT
        self.values = initial.clone()
        """Parameters, then buffers."""
        self.history: dict[int, str] = {}
        """Roots of the epochs we know to be behind us."""
        self._optimizer = Optimizer(settings, layout.segments, layout.num_params)
        self._optimizer_state = self._optimizer.new_state()

    @property
    def params(self) -> torch.Tensor:
        return self.values[: self.layout.num_params]

    def update(self, average: torch.Tensor, root: str) -> UpdateStats:
        """Apply one averaged vector: the optimizer for the gradient, replacement for buffers. `root`: what we had."""
        num_params = self.layout.num_params
        stats = self._optimizer.step(self.params, average[:num_params], self._optimizer_state, self.epoch)
        self.values[num_params:] = average[num_params:]
        self.remember(root)
        self.parent_root = root
        self.epoch += 1
        return stats

    def remember(self, root: str) -> None:
        self.history[self.epoch] = root
        while len(self.history) > MAX_HISTORY:
            del self.history[min(self.history)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by name; views, except for the two that are made up here."""
        named = {f"model/{name}": view for name, view in self.layout.views(self.values).items()}
        for key, flat in self._optimizer_state.items():
            named |= {f"optimizer/{key}/{name}": view for name, view in self.layout.views(flat).items()}
        named["run/epoch"] = torch.tensor(self.epoch, dtype=torch.int64)
        named["run/parent_root"] = torch.tensor(list(bytes.fromhex(self.parent_root)), dtype=torch.uint8)
        return named

    def freeze(self) -> Snapshot:
        """A copy others may fetch from; hashing it gives the root."""
        return Snapshot(self.epoch, {name: tensor.clone() for name, tensor in self.tensors().items()})

    def load(self, tensors: Mapping[str, torch.Tensor], history: Mapping[int, str]) -> None:
        """Become another state, whole, with the history that led to it. The shapes must be this run's."""
        own = self.tensors()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            raise StateError(
                Code.NO_STATE,
                "The offered state belongs to another model.",
                fix="Check that the invite and the state folder are of the same run.",
            )
        for name, tensor in tensors.items():
            if not name.startswith("run/"):
                own[name].copy_(tensor)
        self.epoch = int(tensors["run/epoch"].item())
        self.parent_root = bytes(tensors["run/parent_root"].tolist()).hex()
        self.history = {epoch: root for epoch, root in sorted(history.items())[-MAX_HISTORY:] if epoch < self.epoch}
        if self.epoch > 0:
            self.history[self.epoch - 1] = self.parent_root  # this one is proven: it is part of the root
