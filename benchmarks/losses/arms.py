"""What is compared: who averages what, how often, and how it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collab_core.run.settings import RunSettings

NUM_PEERS = 4
NUM_STEPS = 1600
BATCH_SIZE = 4
LOCAL_STEPS = 50
WARM_UP = 0.05  # of the steps, where rounds are short enough for it

Kind = Literal["alone", "ddp", "hivemind", "fedavg", "allreduce", "diloco", "gossip"]
SYNCHRONOUS: tuple[Kind, ...] = ("ddp", "hivemind", "allreduce")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train; everything that changes the result, apart from data and seed."""

    name: str
    kind: Kind
    lr: float = 0.0
    """Of the inner steps."""
    local_steps: int = LOCAL_STEPS
    codec: str = "none"
    keep: int = 2048
    """Of `topk`: how many of 4096 values travel."""
    outer_lr: float = 0.7
    momentum: float = 0.9
    overlap: int = 0
    """Steps that are taken while a round is under way."""
    mix: float = 0.5
    """How much of its own a trainer keeps then."""

    @property
    def is_synchronous(self) -> bool:
        return self.kind in SYNCHRONOUS

    @property
    def steps_per_epoch(self) -> int:
        return 1 if self.is_synchronous or self.kind == "alone" else self.local_steps

    @property
    def num_steps(self) -> int:
        """Of every peer. Who is alone takes all the steps: equal tokens."""
        return NUM_STEPS * NUM_PEERS if self.kind == "alone" else NUM_STEPS

    def settings(self) -> RunSettings:
        """The run file. Arms that are not ours take the optimizer from it, so that it is the same everywhere."""
        num_epochs = self.num_steps // self.steps_per_epoch
        warmup = int(WARM_UP * num_epochs)
        strategy: dict[str, object] = {"name": "allreduce", "codec": self.codec}
        outer: dict[str, float] = {}
        if self.kind == "diloco":
            strategy |= {"name": "diloco", "local_steps": self.local_steps, "overlap_steps": self.overlap}
            strategy |= {"keep": self.keep} if self.codec == "topk" else {}
            outer = {"lr": self.outer_lr, "momentum": self.momentum, "mix": self.mix}
        return RunSettings.model_validate(
            {
                "name": "loss",
                "strategy": strategy,
                "outer": outer,
                "optimizer": {
                    "lr": self.lr,
                    "warmup_epochs": warmup,
                    "decay": "cosine",
                    "decay_epochs": num_epochs - warmup,
                },
            }
        )
