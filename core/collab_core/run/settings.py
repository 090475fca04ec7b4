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
PeerIdText = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{20,64}$")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
MOST_WAITING = 512  # of 4096 values: if no more are sent with `topk`, most wait for some rounds


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

    name: Literal["allreduce", "diloco", "gossip"] = "allreduce"
    """How replicas are kept together: `allreduce` averages the gradients of every epoch; with `diloco` every trainer
    takes steps of its own, and how far they led is averaged; with `gossip` models differ, and two at a time meet."""
    target_batch_size: Annotated[int, Field(ge=1, le=100_000_000)] = 256
    """Samples the whole swarm collects for one epoch (one global update) with `allreduce`; with `gossip`, what each
    trainer trains on between two meetings."""
    local_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = "auto"
    """Only for `diloco`: steps of a trainer between two rounds of the same fragment; `auto`: 30 to 500, as the links
    need it."""
    fragments: Annotated[int, Field(ge=1, le=64)] = 1
    """Only for `diloco`: pieces of the model that are averaged in turn, one per epoch, so that a round is small."""
    overlap_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """Only for `diloco`: most steps a trainer goes on while a round is under way; 0 waits for the round."""
    codec: Literal["none", "fp16", "int8", "int4", "topk"] = "fp16"
    """How values travel between peers: 4, 2, 1, about half a byte each, or only the largest (`topk`, only for
    `diloco`). What is lost is sent with the next round."""
    keep: Literal[64, 128, 256, 512, 1024, 2048] = 2048
    """Only for the codec `topk`: how many of 4096 values travel; of averages four times as many, but at most half.
    Small models need more of them."""
    reduction: Literal["mean", "centered-clip", "trimmed-mean"] = "mean"
    """How contributions become one: their mean weighted by samples, or one that a few hostile peers cannot move far."""
    matchmaking_time_s: Annotated[float, Field(ge=0.5, le=600)] = 10.0
    """How long a round waits for peers that are expected but have not come."""
    averaging_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """How long a peer may stay silent during a round before it goes on without it."""


class OptimizerSettings(Section):
    """The replicated update, the same arithmetic on every peer; with `diloco`, every trainer's own steps."""

    name: Literal["adamw", "lamb", "sgd", "adamw8bit"] = "adamw"
    """The rule of the update; `adamw8bit` (of bitsandbytes, moments in a quarter of the memory) only with `diloco`."""
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
    nesterov: bool = False
    """Look ahead along the momentum; only for sgd."""
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


class OuterSettings(Section):
    """The replicated update of `diloco`: sgd with Nesterov momentum, along the mean of how far everyone's steps led."""

    lr: PositiveFloat = 0.7
    """1 and no momentum: the mean of everyone's models."""
    momentum: Fraction = 0.9
    """How much of the last updates is kept; 0 with `strategy.keep` of 512 or less, which has a memory of its own."""
    mix: Fraction = 0.5
    """With `overlap_steps`: how much of its own a trainer keeps where a round changed what all have."""


class GossipSettings(Section):
    """When a `gossip` run is over: the models agree, and the loss falls no more."""

    stop: Literal["never", "converged"] = "never"
    """`converged`: the run ends by itself once most trainers see it so."""
    consensus: PositiveFloat = 1e-3
    """Models agree if their squared distance, relative to how far they have come, is below this."""
    plateau: PositiveFloat = 1e-3
    """The loss on held-out data falls no more if it loses less than this part of itself in a window."""
    window: Annotated[int, Field(ge=2, le=1000)] = 20
    """Rounds (meetings of one trainer) in a window."""
    num_windows: Annotated[int, Field(ge=1, le=100)] = 3
    """Windows in a row in which the loss must not fall."""


class LimitSettings(Section):
    """What a single peer may do to the run."""

    max_samples_per_peer: Annotated[int, Field(ge=1)] = 4096
    """Most samples one peer may contribute to one epoch: its greatest weight in the average."""
    quarantine_epochs: Annotated[int, Field(ge=0, le=100_000)] = 10
    """How long a peer that lied is kept out of rounds, twice as long with every further lie; 0: never."""
    max_epochs: Annotated[int, Field(ge=0)] = 0
    """The run ends after this many epochs; 0 means it has no end."""


class CheckpointSettings(Section):
    """What auxiliary peers keep of the run."""

    every: Annotated[int, Field(ge=0)] = 1
    """Epochs between two versions in the archive; 0 keeps none."""
    keep: Annotated[int, Field(ge=1)] = 20
    """Newest versions that are kept; of older ones, every 10th and every 100th epoch."""
    prefer: Literal["storage", "balanced", "speed"] = "balanced"
    """Whether old versions should be small, or quick to get back."""
    evaluate: Annotated[int, Field(ge=0)] = 10
    """Epochs between two measurements of the loss on held-out data, by auxiliaries; 0 never."""
    remote: Annotated[str, Field(max_length=200)] = ""
    """Where whole states go too, for the day nobody is there: `owner/name` on the Hub, or a folder; empty: nowhere."""
    upload_every: Annotated[int, Field(ge=1)] = 10
    """Epochs between two of those."""
    checkpointers: Annotated[list[PeerIdText], Field(max_length=16)] = Field(default_factory=list)
    """Peer IDs of those who upload them; none: the organiser's auxiliaries."""


class RunSettings(Section):
    """One whole run file."""

    name: Name
    """What people call the run; `collab new` takes it from the folder."""
    description: Annotated[str, Field(max_length=500)] = ""
    """One or two sentences for the people you invite."""
    task: TaskSettings = Field(default_factory=TaskSettings)
    strategy: StrategySettings = Field(default_factory=StrategySettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    outer: OuterSettings = Field(default_factory=OuterSettings)
    gossip: GossipSettings = Field(default_factory=GossipSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    checkpoints: CheckpointSettings = Field(default_factory=CheckpointSettings)

    @model_validator(mode="after")
    def _combinations(self) -> RunSettings:
        if self.optimizer.decay != "constant" and self.optimizer.decay_epochs == 0:
            raise ValueError(f"optimizer.decay = {self.optimizer.decay!r} needs optimizer.decay_epochs > 0")
        if self.optimizer.decay == "constant" and self.optimizer.decay_epochs > 0:
            raise ValueError("optimizer.decay_epochs is set, but optimizer.decay = 'constant' never decays")
        if self.optimizer.nesterov and self.optimizer.momentum == 0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum > 0")
        if self.strategy.name != "diloco" and self.optimizer.name == "adamw8bit":
            raise ValueError("optimizer.name = 'adamw8bit' is only for strategy.name = 'diloco': it is not exact")
        if self.strategy.name == "gossip" and self.strategy.codec != "none":
            raise ValueError(
                f"with strategy.name = 'gossip', strategy.codec is 'none', not {self.strategy.codec!r}: two models "
                "that meet must come to the same bits, and none of what they hold may be lost on the way"
            )
        if self.strategy.name != "gossip" and self.gossip != GossipSettings():
            raise ValueError(f"[gossip] is only for strategy.name = 'gossip', not for {self.strategy.name!r}")
        if self.optimizer.momentum > 0 and self.optimizer.name != "sgd":
            raise ValueError(f"optimizer.momentum is only for 'sgd', but optimizer.name = {self.optimizer.name!r}")
        self._check_diloco()
        if self.strategy.name == "allreduce" and self.limits.max_samples_per_peer < self.strategy.target_batch_size:
            raise ValueError(
                f"limits.max_samples_per_peer = {self.limits.max_samples_per_peer} is less than "
                f"strategy.target_batch_size = {self.strategy.target_batch_size}, so a peer that is alone could never "
                "finish an epoch"
            )
        return self

    def _check_diloco(self) -> None:
        strategy, defaults = self.strategy, StrategySettings()
        if strategy.name == "diloco":
            if strategy.codec == "topk" and strategy.keep <= MOST_WAITING and self.outer.momentum > 0:
                raise ValueError(
                    f"strategy.keep = {strategy.keep} needs outer.momentum = 0: most values wait for some rounds, "
                    "and that acts as momentum does"
                )
            if strategy.codec != "topk" and strategy.keep != defaults.keep:
                raise ValueError(f"strategy.keep is only for strategy.codec = 'topk', not for {strategy.codec!r}")
            return
        if self.outer != OuterSettings():
            raise ValueError(f"[outer] is only for strategy.name = 'diloco', not for {strategy.name!r}")
        if strategy.codec == "topk":
            raise ValueError(f"strategy.codec = 'topk' is only for strategy.name = 'diloco', not for {strategy.name!r}")
        for key in ("local_steps", "fragments", "overlap_steps", "keep"):
            if getattr(strategy, key) != getattr(defaults, key):
                raise ValueError(f"strategy.{key} is only for strategy.name = 'diloco', not for {strategy.name!r}")

    @property
    def update(self) -> OptimizerSettings:
        """The replicated update of this run's strategy."""
        if self.strategy.name == "allreduce":
            return self.optimizer
        return OptimizerSettings(
            name="sgd",
            lr=self.outer.lr,
            momentum=self.outer.momentum,
            nesterov=self.outer.momentum > 0,
            weight_decay=0.0,
            clip_norm=0.0,
            warmup_epochs=0,
        )
