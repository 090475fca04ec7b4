"""The run as data: what `run.toml` may say. Everything here must be equal for every peer; nothing here is code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")]
# Volunteers are told to type this after `pip install`, so there is no room in it for another command or another index.
Requirement = Annotated[
    str,
    Field(
        max_length=200,
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
        r"((===?|[<>!~]=|[<>])[0-9A-Za-z.*+!]+(,(===?|[<>!~]=|[<>])[0-9A-Za-z.*+!]+)*)?)?$",
    ),
]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Strict: no unknown keys, no guessing of types, no changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class TaskSettings(Section):
    """What is trained, on what."""

    name: Annotated[str, Field(max_length=200)] = "tiny-gpt"
    """A built-in task, or `package.module:Class` of an installed package that registers it."""
    package: Requirement = ""
    """What to install for a task that is not built in, e.g. `my-task>=1.0`. Shown, never installed by itself."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial parameters."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task; the task itself checks them."""


class StrategySettings(Section):
    """How peers work together."""

    name: Literal["allreduce"] = "allreduce"
    """How replicas are kept together: `allreduce` averages the gradients of every epoch."""
    target_batch_size: Annotated[int, Field(ge=1, le=10_000_000)] = 256
    """Samples the whole swarm collects for one epoch (one global update)."""
    codec: Literal["none", "fp16"] = "fp16"
    """How values travel between peers."""
    matchmaking_time_s: Annotated[float, Field(ge=0.5, le=600)] = 10.0
    """How long a round waits for peers that are expected but have not come."""
    averaging_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """How long a peer may stay silent during a round before it goes on without it."""


class OptimizerSettings(Section):
    """The replicated update, the same arithmetic on every peer."""

    name: Literal["adamw", "lamb", "sgd"] = "adamw"
    """The rule of the update."""
    lr: PositiveFloat = 0.01
    """Learning rate after warm-up."""
    beta1: Fraction = 0.9
    """How much of the running mean of the gradient is kept per epoch; adamw and lamb."""
    beta2: Fraction = 0.95
    """The same for the running mean of its square; adamw and lamb."""
    eps: PositiveFloat = 1e-8
    """Added to the divisor, so that it is never zero; adamw and lamb."""
    momentum: Fraction = 0.0
    """Only for sgd."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """How strongly weights are pulled towards zero, times the learning rate; biases and norms are not."""
    clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Largest norm of the averaged gradient; 0 turns clipping off."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs over which the learning rate grows linearly to `lr`."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up."""
    decay_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs after warm-up until the learning rate has reached its final value; needed unless decay is constant."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a fraction of `lr`."""


class LimitSettings(Section):
    """What a single peer may do to the run."""

    max_samples_per_peer: Annotated[int, Field(ge=1)] = 4096
    """Most samples one peer may contribute to one epoch: its greatest weight in the average."""
    max_epochs: Annotated[int, Field(ge=0)] = 0
    """The run ends after this many epochs; 0 means it has no end."""


class CheckpointSettings(Section):
    """What auxiliary peers keep of the run."""

    every: Annotated[int, Field(ge=0)] = 1
    """Epochs between two versions in the archive; 0 keeps none."""
    keep: Annotated[int, Field(ge=1)] = 20
    """Newest versions that are kept; of older ones, every 10th and every 100th epoch."""


class RunSettings(Section):
    """One whole run file."""

    name: Name
    """What people call the run; `collab new` takes it from the folder."""
    description: Annotated[str, Field(max_length=500)] = ""
    """One or two sentences for the people you invite."""
    task: TaskSettings = Field(default_factory=TaskSettings)
    strategy: StrategySettings = Field(default_factory=StrategySettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    checkpoints: CheckpointSettings = Field(default_factory=CheckpointSettings)

    @model_validator(mode="after")
    def _combinations(self) -> RunSettings:
        if self.optimizer.decay != "constant" and self.optimizer.decay_epochs == 0:
            raise ValueError(f"optimizer.decay = {self.optimizer.decay!r} needs optimizer.decay_epochs > 0")
        if self.optimizer.decay == "constant" and self.optimizer.decay_epochs > 0:
            raise ValueError("optimizer.decay_epochs is set, but optimizer.decay = 'constant' never decays")
        if self.optimizer.momentum > 0 and self.optimizer.name != "sgd":
            raise ValueError(f"optimizer.momentum is only for 'sgd', but optimizer.name = {self.optimizer.name!r}")
        if self.limits.max_samples_per_peer < self.strategy.target_batch_size:
            raise ValueError(
                f"limits.max_samples_per_peer = {self.limits.max_samples_per_peer} is less than "
                f"strategy.target_batch_size = {self.strategy.target_batch_size}, so a peer that is alone could never "
                "finish an epoch"
            )
        return self
