"""This peer's copy of the run's state: parameters, buffers, global optimizer state, epoch, history."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collab_core.errors import Code, StateError
from collab_core.run.settings import OptimizerSettings
from collab_core.state.layout import Fragment, Layout
from collab_core.state.snapshot import Snapshot
from collab_core.tree import MAX_HISTORY
from collab_core.update import Optimizer, UpdateStats

NO_PARENT = "0" * 64


class Replica:
    """The state, flat and on the CPU in float32. Everything that counts is in its root."""

    def __init__(
        self, layout: Layout, settings: OptimizerSettings, initial: torch.Tensor, num_fragments: int = 1
    ) -> None:
        """
        Args:
            layout: where everything lies.
            settings: of the replicated update.
            initial: parameters and buffers at epoch 0.
            num_fragments: every epoch updates one of so many pieces, in turn.
        """
        self.layout = layout
        self.fragments = layout.fragments(num_fragments)
        self.epoch = 0
        self.parent_root = NO_PARENT
        self.values = initial.clone()
        """Parameters, then buffers."""
        self.history: dict[int, str] = {}
        """Roots of the epochs we know to be behind us."""
        self.num_loads = 0
        """How often the state was replaced as a whole: whatever was begun from the last one is over then."""
        self._optimizers = [Optimizer(settings, piece.segments, piece.num_params) for piece in self.fragments]
        names = self._optimizers[0].state_names
        self._optimizer_state = {name: torch.zeros(layout.num_params) for name in names}

    @property
    def fragment(self) -> Fragment:
        """What this epoch's round is about."""
        return self.fragments[self.epoch % len(self.fragments)]

    def update(self, average: torch.Tensor, root: str) -> UpdateStats:
        """Apply this epoch's averaged vector: what the optimizer needs, then how far buffers moved.

        Args:
            average: as long as this epoch's fragment.
            root: what we had.
        """
        piece = self.fragment
        optimizer = self._optimizers[self.epoch % len(self.fragments)]
        params, buffers = (
            slice(piece.start, piece.start + piece.num_params),
            slice(piece.start + piece.num_params, piece.stop),
        )
        state = {name: flat[params] for name, flat in self._optimizer_state.items()}
        stats = optimizer.step(self.values[params], average[: piece.num_params], state, self.epoch)
        if stats.is_finite:
            self.values[buffers] += average[piece.num_params :]
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
        self.num_loads += 1
        self.epoch = int(tensors["run/epoch"].item())
        self.parent_root = bytes(tensors["run/parent_root"].tolist()).hex()
        self.history = {epoch: root for epoch, root in sorted(history.items())[-MAX_HISTORY:] if epoch < self.epoch}
        if self.epoch > 0:
            self.history[self.epoch - 1] = self.parent_root  # this one is proven: it is part of the root
