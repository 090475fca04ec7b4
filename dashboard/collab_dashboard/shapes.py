"""What the API tells of a run. These models are its documentation too: OpenAPI is made from them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel

from collab_core.situation import Tone


class Quarantined(BaseModel):
    """Why a peer is kept out of rounds."""

    until_epoch: int
    reason: str


class PeerView(BaseModel):
    """A peer, as its signed record tells."""

    peer_id: str
    name: str
    role: Literal["trainer", "aux"]
    link: Literal["direct", "relay", "client"]
    """How others reach it."""
    version: str
    phase: str
    """What it is doing."""
    presence: Literal["here", "silent", "gone"]
    """`silent`: its record is older than it should be. `gone`: it said goodbye, or its record ran out."""
    last_seen: float
    """When a new record of it last arrived here, in Unix time."""
    state: Literal["newest", "other", "none"]
    """Whether it holds the state everyone should have, another one, or none; who is gone holds none."""
    epoch: int
    samples: int
    """What it says it contributed to finished epochs."""
    epoch_samples: int
    samples_per_second: float
    upload: float
    """Bytes per second that its link carries, as far as it knows; 0: unknown."""
    download: float
    loss: float | None = None
    distance: float | None = None
    """In a gossip run: how far its model is from the others'."""
    is_organisers: bool = False
    """The organiser vouches for it."""
    is_this: bool = False
    """It is the auxiliary that serves this page."""
    quarantined: Quarantined | None = None


class Point(NamedTuple):
    """The run at one moment."""

    epoch: int
    samples: int
    loss: float | None
    samples_per_second: float
    num_trainers: int


class Measured(NamedTuple):
    """The loss on held-out data."""

    epoch: int
    samples: int
    loss: float


class HistoryView(BaseModel):
    """The past; keys are Unix time in milliseconds. Old moments lie further apart than new ones."""

    points: dict[int, Point]
    """`[epoch, samples, loss, samples_per_second, num_trainers]`"""
    held_out: dict[int, Measured]
    """`[epoch, samples, loss]`"""


class EventView(BaseModel):
    """Something that happened, in words."""

    time: float
    kind: str
    tone: Tone
    text: str


class Contributor(BaseModel):
    """A row of the leaderboard."""

    name: str
    samples: int
    is_here: bool


class Leaderboard(BaseModel):
    """Who contributed most."""

    counted_by: Literal["auxiliary", "peers"]
    """`auxiliary`: what the one that serves this page saw in the rounds. `peers`: what everyone says of itself."""
    rows: list[Contributor]


class VersionView(BaseModel):
    """A version in the archive."""

    epoch: int | None = None
    root: str
    created: float | None = None
    loss: float | None = None
    held_out_loss: float | None = None


class ArchiveView(BaseModel):
    """What auxiliaries keep of the run."""

    num_versions: int
    stored_bytes: int | None = None
    newest: list[VersionView]
    """Newest first."""


class CheckpointView(BaseModel):
    """A whole state on the Hub, or wherever the run keeps them."""

    epoch: int
    root: str
    revision: str
    place: str


class SampleView(BaseModel):
    """What the model wrote."""

    epoch: int
    time: float
    text: str


class Progress(BaseModel):
    """The epoch under way."""

    collected: int
    target: int
    """0: everyone has a target of its own."""
    since: float | None = None
    """When the last epoch ended, if that was seen from here."""


class RunView(BaseModel):
    """A run, now and before."""

    run_id: str
    name: str
    description: str
    task: str
    strategy: str
    version: str
    state: str
    """What is going on, in words."""
    tone: Tone
    epoch: int
    max_epochs: int
    """0: the run has no end."""
    model_root: str | None
    samples: int
    """Behind the state everyone should have."""
    tokens_per_sample: int | None
    """Null: the task does not count in tokens."""
    loss: float | None
    held_out_loss: float | None
    floor: float | None
    """The lowest loss that can be reached, if it is known."""
    samples_per_second: float
    progress: Progress
    num_trainers: int
    num_auxiliaries: int
    num_quarantined: int
    num_unlisted: int
    """Peers that are not in `peers`, as there are too many."""
    peers: dict[str, PeerView]
    leaderboard: Leaderboard
    archive: ArchiveView | None
    checkpoints: list[CheckpointView]
    """Newest first; as far as the auxiliary's log, or whoever looks on, has seen them."""
    texts: list[SampleView]
    """What the model wrote over time, oldest first; only where an auxiliary serves the page, and the task can do so."""
    events: dict[int, EventView]
    """By number, oldest first."""
    invite: str
    history: HistoryView


class Document(BaseModel):
    """Everything: what the WebSocket begins with."""

    time: float
    """The clock of the machine that serves this."""
    runs: dict[str, RunView]


class RunSummary(BaseModel):
    """One of several runs."""

    run_id: str
    name: str
    state: str
    epoch: int
    loss: float | None
    samples_per_second: float
    num_trainers: int
