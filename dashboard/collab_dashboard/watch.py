"""One run, looked at once per second: who is there and was there, what happened, how it went."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from collab_core.overview import Overview, survey
from collab_core.run.manifest import Manifest
from collab_core.situation import state_in_words
from collab_core.state.claims import is_trusted
from collab_core.swarm import Peer
from collab_core.telemetry import EventLog
from collab_dashboard.history import Series
from collab_dashboard.shapes import (
    ArchiveView,
    CheckpointView,
    Contributor,
    HistoryView,
    Leaderboard,
    Measured,
    PeerView,
    Point,
    Progress,
    Quarantined,
    RunView,
    SampleView,
)
from collab_dashboard.timeline import tell

MAX_POINTS = 600
MAX_HELD_OUT = 200
MAX_EVENTS = 150
MAX_TEXTS = 12
MAX_CHECKPOINTS = 12
MAX_TEXT_CHARS = 1200
MAX_PEERS = 300  # in the table
MAX_REMEMBERED = 600  # peers that are gone among them
REMEMBER_S = 3600.0
MAX_NAMES = 1000
MAX_ROWS = 20
SILENT_S = 10.0  # records are made anew every 3 s, and while no round is near, heard of after up to 5 s more


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """What only the task knows."""

    tokens_per_sample: int | None = None
    floor: Callable[[], float | None] = lambda: None
    """May take its time."""


@dataclass(slots=True)
class Seen:
    """A peer, and when we last heard of it."""

    peer: Peer
    last_seen: float
    is_gone: bool = False


@dataclass(slots=True)
class RunWatch:
    """What can be told of a run. `look` is called once per second by one thread; events may come from any.

    Args:
        manifest: of the run.
        invite: for those who want to join.
        peers: everyone whose record is known now.
        own: our own record, if we take part.
        name_of: what a peer is called in our log, if we take part.
        facts: what the task knows.
        archive: what is kept of the run; asked in a thread of its own, now and then.
    """

    manifest: Manifest
    invite: Callable[[], str]
    peers: Callable[[], Iterable[Peer]]
    own: Callable[[], Peer] | None = None
    name_of: Callable[[str], str] | None = None
    facts: TaskFacts = field(default_factory=TaskFacts)
    archive: Callable[[], ArchiveView | None] | None = None
    archived: ArchiveView | None = None
    floor: float | None = None
    _seen: dict[str, Seen] = field(default_factory=dict)
    _points: Series[Point] = field(default_factory=lambda: Series(MAX_POINTS, is_steady=True))
    _held_out: Series[Measured] = field(default_factory=lambda: Series(MAX_HELD_OUT, is_steady=False))
    _texts: deque[SampleView] = field(default_factory=lambda: deque(maxlen=MAX_TEXTS))
    _events: dict[int, Any] = field(default_factory=dict)
    _num_events: int = 0
    _counted: dict[str, int] = field(default_factory=dict)
    """Samples by name, of all rounds in our log."""
    _samples: dict[int, int] = field(default_factory=dict)
    """Behind each epoch, of the last ones."""
    _last: Overview | None = None
    _epoch: int = -1
    _epoch_since: float | None = None
    """When the last epoch ended; None: before we looked."""
    _looked_since: float = field(default_factory=time.time)
    _kept_out: set[tuple[str, int]] = field(default_factory=set)
    _checkpoints: dict[int, CheckpointView] = field(default_factory=dict)
    """By epoch."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # --- the log of the peer we sit in ---

    def follow(self, events: EventLog) -> None:
        """Take up what this peer's log tells of the past, and everything it tells from now on."""
        now = time.time()
        events.listen(self.hear)
        for event in events.past(self.manifest.run_id):
            if event["time"] < now:
                self.hear(event)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Something happened."""
        with self._lock:
            try:
                self._note(event)
            except (KeyError, TypeError, ValueError, AttributeError):  # a line of another version's log
                return
            view = tell(event)
            if view is not None:
                last = next(reversed(self._events.values()), None)
                if last is not None and (last.kind, last.text) == (view.kind, view.text):
                    return  # what is tried again and again is said once
                self._num_events += 1
                self._events[self._num_events] = view
                self._events.pop(self._num_events - MAX_EVENTS, None)

    def _note(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "swarm":
                epoch, samples = int(event["epoch"]), int(event["samples"])
                self._samples[epoch] = samples
                while len(self._samples) > MAX_POINTS:
                    del self._samples[next(iter(self._samples))]
                if self._epoch < 0:  # of the past: what is now, we see ourselves
                    rate, trainers = float(event["samples_per_second"]), int(event["trainers"])
                    loss = event["loss"] if isinstance(event["loss"], float) and math.isfinite(event["loss"]) else None
                    self._points.add(event["time"], Point(epoch, samples, loss, rate, trainers))
            case "epoch" | "assisted":
                if self._epoch < 0:
                    self._epoch_since = float(event["time"])
                for name, samples in event["members"].items():
                    self._counted[name] = self._counted.get(name, 0) + int(samples)
                while len(self._counted) > MAX_NAMES:
                    del self._counted[min(self._counted, key=self._counted.__getitem__)]
            case "evaluated":
                epoch, loss = int(event["epoch"]), float(event["held_out_loss"])
                samples = self._samples.get(epoch, max(self._samples.values(), default=0))
                if math.isfinite(loss):
                    self._held_out.add(event["time"], Measured(epoch, samples, loss))
            case "checkpoint" if "revision" in event:
                self._keep_checkpoint(int(event["epoch"]), str(event["root"]), str(event["revision"]))
            case "sampled":
                text = str(event["text"])[:MAX_TEXT_CHARS]
                self._texts.append(SampleView(epoch=int(event["epoch"]), time=float(event["time"]), text=text))

    def _keep_checkpoint(self, epoch: int, root: str, revision: str) -> None:
        place = self.manifest.settings.checkpoints.remote
        self._checkpoints[epoch] = CheckpointView(epoch=epoch, root=root, revision=revision, place=place)
        for old in sorted(self._checkpoints)[:-MAX_CHECKPOINTS]:
            del self._checkpoints[old]

    # --- the swarm ---

    def look(self) -> RunView:
        """The run now; remembers it for later."""
        now = time.time()
        present = [*self.peers(), *([self.own()] if self.own is not None else ())]
        seen = self._last = survey(present, self.manifest, self._last)
        with self._lock:
            self._meet(seen, now)
            self._remember(seen, now)
            return self._view(seen, now)

    def _meet(self, seen: Overview, now: float) -> None:
        here = {peer.peer_id: peer for peer in seen.peers}
        own = self.own().peer_id if self.own is not None else ""
        for peer_id, peer in here.items():
            known = self._seen.get(peer_id)
            if known is None or known.peer.record.time != peer.record.time or peer_id == own:
                self._seen[peer_id] = Seen(peer, now)
            else:
                known.peer, known.is_gone = peer, False
        for peer_id, known in list(self._seen.items()):
            known.is_gone = peer_id not in here
            if known.is_gone and now - known.last_seen > REMEMBER_S:
                del self._seen[peer_id]
        gone = sorted((one.last_seen, peer_id) for peer_id, one in self._seen.items() if one.is_gone)
        for _, peer_id in gone[: max(0, len(self._seen) - MAX_REMEMBERED)]:
            del self._seen[peer_id]

    def _remember(self, seen: Overview, now: float) -> None:
        if seen.epoch != self._epoch:
            self._epoch_since = now if self._epoch >= 0 else self._epoch_since
            self._epoch = seen.epoch
        if seen.peers:
            point = Point(seen.epoch, seen.samples, seen.loss, round(seen.samples_per_second, 2), len(seen.trainers))
            self._points.add(now, point)
        note = seen.checkpoint
        known = None if note is None else self._checkpoints.get(note.epoch)
        if note is not None and (known is None or known.revision != note.revision):
            place = self.manifest.settings.checkpoints.remote
            if self.own is None:
                self.hear({"time": now, "event": "checkpoint", "place": place, **note.model_dump()})
            else:  # our own log tells of those that are ours
                self._keep_checkpoint(note.epoch, note.root, note.revision)
        if self.own is None:
            self._tell_news(seen, now)

    def _tell_news(self, seen: Overview, now: float) -> None:
        """Who only looks on has no log that tells this."""
        kept_out = {(peer_id, sentence.until_epoch) for peer_id, sentence in seen.kept_out.items()}
        for peer_id, until in kept_out - self._kept_out:
            reason = seen.kept_out[peer_id].reason
            facts = {"until_epoch": until, "reason": reason, "said_by": "the others", "is_believed": True}
            self.hear({"time": now, "event": "quarantined", "name": self._name(peer_id), **facts})
        for peer_id in {who for who, _ in self._kept_out} - set(seen.kept_out):
            self.hear({"time": now, "event": "released", "name": self._name(peer_id)})
        self._kept_out = kept_out

    def _name(self, peer_id: str) -> str:
        return self._seen[peer_id].peer.record.name if peer_id in self._seen else peer_id[-8:]

    def _label(self, peer: Peer) -> str:
        return peer.record.name if self.name_of is None else self.name_of(peer.peer_id)

    # --- in the API's shapes ---

    def _view(self, seen: Overview, now: float) -> RunView:
        settings = self.manifest.settings
        since = self._epoch_since
        tone, words = state_in_words(seen, settings, now - (self._looked_since if since is None else since))
        held_out = self._held_out.last
        listed = sorted(self._seen.values(), key=lambda one: (one.is_gone, -one.last_seen))[:MAX_PEERS]
        return RunView(
            run_id=self.manifest.run_id,
            name=settings.name,
            description=settings.description,
            task=settings.task.name,
            strategy=settings.strategy.name,
            version=max((peer.record.version for peer in seen.peers), default=""),
            state=words,
            tone=tone,
            epoch=seen.epoch,
            max_epochs=settings.limits.max_epochs,
            model_root=seen.tip.root or None,
            samples=seen.samples,
            tokens_per_sample=self.facts.tokens_per_sample,
            loss=seen.loss,
            held_out_loss=None if held_out is None else held_out.loss,
            floor=self.floor,
            samples_per_second=round(seen.samples_per_second, 2),
            progress=Progress(
                collected=seen.collected, target=seen.target, since=None if since is None else round(since, 1)
            ),
            num_trainers=len(seen.trainers),
            num_auxiliaries=sum(peer.record.role == "aux" for peer in seen.peers),
            num_quarantined=len(seen.kept_out),
            num_unlisted=len(self._seen) - len(listed),
            peers={one.peer.peer_id: self._peer(one, seen, now) for one in listed},
            leaderboard=self._leaderboard(),
            archive=self.archived,
            checkpoints=[self._checkpoints[epoch] for epoch in sorted(self._checkpoints, reverse=True)],
            texts=list(self._texts),
            events=dict(self._events),
            invite=self.invite(),
            history=HistoryView(points=self._points.points(), held_out=self._held_out.points()),
        )

    def _peer(self, one: Seen, seen: Overview, now: float) -> PeerView:
        peer_id, record = one.peer.peer_id, one.peer.record
        is_this = self.own is not None and self.own().peer_id == peer_id
        presence: Literal["here", "silent", "gone"] = "here" if now - one.last_seen < SILENT_S else "silent"
        sentence = seen.kept_out.get(peer_id)
        root = None if one.is_gone else record.root
        assert record.role != "observer"
        return PeerView(
            peer_id=peer_id,
            name=record.name,
            role=record.role,
            link=record.mode,
            version=record.version,
            phase=record.phase,
            presence="gone" if one.is_gone else presence,
            last_seen=round(one.last_seen, 1),
            state="none" if root is None else "newest" if root == seen.tip.root else "other",
            epoch=record.epoch,
            samples=record.samples,
            epoch_samples=record.epoch_samples,
            samples_per_second=round(record.samples_per_second, 2),
            upload=record.upload,
            download=record.download,
            loss=record.loss,
            distance=None if record.gossip is None else record.gossip.distance,
            is_organisers=is_trusted(peer_id, record, self.manifest),
            is_this=is_this,
            quarantined=None
            if sentence is None
            else Quarantined(until_epoch=sentence.until_epoch, reason=sentence.reason),
        )

    def _leaderboard(self) -> Leaderboard:
        trainers = [one for one in self._seen.values() if one.peer.record.role == "trainer"]
        here = {self._label(one.peer) for one in trainers if not one.is_gone}
        if self.own is not None and self._counted:
            rows = [Contributor(name=name, samples=n, is_here=name in here) for name, n in self._counted.items() if n]
        else:
            rows = [
                Contributor(name=one.peer.record.name, samples=one.peer.record.samples, is_here=not one.is_gone)
                for one in trainers
                if one.peer.record.samples
            ]
        rows.sort(key=lambda row: (-row.samples, row.name))
        counted_by: Literal["auxiliary", "peers"] = "auxiliary" if self.own is not None and self._counted else "peers"
        return Leaderboard(counted_by=counted_by, rows=rows[:MAX_ROWS])
