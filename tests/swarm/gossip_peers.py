"""Gossip peers inside the test's own process: real daemons and sockets, toy vectors, and faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import LOOPBACK, wait_until

from collab_core.gossip import Change, Faults, Journal, Meetings, Outcome, Terms, moved
from collab_core.state.folder import StateFolder
from collab_core.state.throttle import Throttle
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.swarm.record import GossipNote
from collab_core.telemetry import EventLog

RUN_HASH = bytes(range(32))
RUN_ID = RUN_HASH.hex()
NUM_VALUES = 100_000  # several pieces on the wire


class CutAt:
    """Breaks the connection at one stage, once."""

    def __init__(self, stage: str, then: Callable[[], None] = lambda: None) -> None:
        self.stage, self._then = stage, then
        self.has_failed = threading.Event()

    def reached(self, stage: str, epoch: int) -> None:
        if stage == self.stage and not self.has_failed.is_set():
            self.has_failed.set()
            self._then()
            raise ConnectionResetError


class ToyGossiper:
    """A peer whose model is a vector, and a thread that attends to those who come."""

    def __init__(
        self, folder: Path, values: torch.Tensor, *, weight: float = 1.0, first: str = "", **swarm: Any
    ) -> None:
        self.folder, self.values, self.weight, self._first, self._options = folder, values, weight, first, swarm
        self.log: list[dict[str, Any]] = []
        self.met: list[Change] = []
        self.faults: Faults | None = None
        self._busy = threading.RLock()
        self.start(kept=())

    def start(self, kept: tuple[str, ...]) -> None:
        """Begin, or begin again with the model as it is, in which these exchanges are."""
        self._state = StateFolder(self.folder)
        events = EventLog(self._state.events)
        events.listen(self.log.append)
        first = (self._first,) if self._first else ()
        config = SwarmConfig(role="trainer", host_maddrs=(LOOPBACK,), initial_peers=first, **self._options)
        self.swarm = Swarm(config, self._state, events)
        self.swarm.connect()
        self.swarm.join(RUN_HASH)
        self.swarm.publish(phase="working", gossip=GossipNote())
        terms = Terms(
            layout=b"toy",
            num_values=NUM_VALUES,
            weight=self.weight,
            weight_cap=1000.0,
            patience_s=3.0,
            transfer_s=5.0,
        )
        journal = Journal(self._state.exchanges, RUN_ID)
        self.throttle = Throttle()
        self.meetings = Meetings(self.swarm, terms, journal, kept=kept, throttle=self.throttle, faults=self)
        self.meetings.tell_lost()
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        return self.swarm.peer_id

    def reached(self, stage: str, epoch: int) -> None:
        if self.faults is not None:
            self.faults.reached(stage, epoch)

    def _attend(self) -> None:
        while not self.stop.wait(0.005):
            with self._busy:
                self.take()
                if self.meetings.is_waiting:
                    self.meetings.hand_out(self.values.clone())

    def pausing(self) -> threading.RLock:
        """While it is held, nobody is attended to."""
        return self._busy

    def take(self) -> None:
        for change in self.meetings.changes():
            self.values = moved(self.values, change.old, change.average)
            self.meetings.epoch += change.rounds
            self.met.append(change)

    def meet(self, other: ToyGossiper) -> Outcome:
        with self._busy:
            outcome = self.meetings.meet(other.id, self.values.clone(), self.stop)
            self.take()
            return outcome

    def told(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.log if one["event"] == event]

    def wait_for(self, event: str, timeout_s: float = 20) -> dict[str, Any]:
        wait_until(lambda: any(one["event"] == event for one in self.log), f"{event} of {self.folder.name}", timeout_s)
        return next(one for one in self.log if one["event"] == event)

    def die(self) -> None:
        """From one moment to the next nobody hears of us any more. `close` cleans up, `start` begins again."""
        self.swarm._transport.stop()

    def close(self) -> None:
        self.stop.set()
        self._thread.join(5)
        self.swarm.close()
        self._state.close()


def acquaint(*peers: ToyGossiper) -> None:
    """Wait until everyone knows everyone."""
    deadline = time.monotonic() + 20
    while any(len(peer.swarm.peers()) < len(peers) - 1 for peer in peers):
        assert time.monotonic() < deadline, [len(peer.swarm.peers()) for peer in peers]
        time.sleep(0.02)
