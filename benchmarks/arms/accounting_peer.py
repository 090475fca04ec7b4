"""`collab`, which keeps an account of what the exchanges of a gossip run did to its model, in the file ACCOUNT.

In an allreduce run it brings one batch to every epoch, neither more nor less: a trainer of a real run goes on until it
hears that the batch of all is full, and with steps as short as these that would be many samples too many.
"""

from __future__ import annotations

import os

import torch

from collab_cli.app import main
from collab_core.gossip import Change
from collab_trainer.gossip.own_model import OwnModel
from collab_trainer.gossip.trainer import GossipTrainer
from collab_trainer.trainer import Trainer

honest_take, honest_leave = OwnModel.take, GossipTrainer.leave
received: list[torch.Tensor] = []


def take(self: OwnModel, change: Change) -> None:
    before = self.layout.read(self.model).double()
    honest_take(self, change)
    moved = self.layout.read(self.model).double() - before
    received[:] = [received[0] + moved if received else moved]


def leave(self: GossipTrainer) -> None:
    honest_leave(self)
    moved = received[0] if received else torch.zeros(self.own.layout.num_values, dtype=torch.float64)
    torch.save({"weight": self._terms().weight, "received": moved}, os.environ["ACCOUNT"])


def should_average(self: Trainer, num_samples: int) -> bool:
    return num_samples > 0


Trainer._should_average = should_average  # type: ignore[method-assign]
OwnModel.take = take  # type: ignore[method-assign]
GossipTrainer.leave = leave  # type: ignore[method-assign]
main()
