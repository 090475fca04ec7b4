"""Peers inside the test's own process: real daemons and sockets, toy vectors instead of models."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import LOOPBACK

from collab_core.averaging.averager import ExactAverager
from collab_core.averaging.link import Bandwidth
from collab_core.averaging.round import RoundOutcome, RoundRequest
from collab_core.run import RunSettings
from collab_core.state.folder import StateFolder
from collab_core.swarm import Peer, Swarm, SwarmConfig
from collab_core.telemetry import EventLog

RUN_HASH = bytes(range(32))
LAYOUT_HASH = bytes(32)
NUM_VALUES = 300_001  # several parts per reducer, and an odd size


def vectors(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(count)]


def same_bits(values: list[torch.Tensor | None]) -> bool:
    return all(value is not None and values[0] is not None and torch.equal(value, values[0]) for value in values)


def settings(codec: str = "none", **strategy: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "name": "toy",
            "strategy": {"codec": codec, "matchmaking_time_s": 3.0, "averaging_timeout_s": 5.0, **strategy},
            "limits": {"max_samples_per_peer": 1000},
        }
    )


@dataclass
class ToyPeer:
    """A swarm member with an averager."""

    swarm: Swarm
    averager: ExactAverager
    log: list[dict[str, Any]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def others(self) -> list[Peer]:
        return self.swarm.peers()

    def insist(self, values: torch.Tensor | None, weight: float, *, attempts: int = 3, **changes: Any) -> RoundOutcome:
        """As `Peer.average` does: a round that found no group, or lost a reducer, is tried again."""
        lost: frozenset[str] = frozenset()
        for _ in range(attempts):
            outcome = self.round(values, weight, lost=lost, **changes)
            if outcome.average is not None:
                break
            lost |= outcome.lost.keys()
        return outcome

    def round(self, values: torch.Tensor | None, weight: float, **changes: Any) -> RoundOutcome:
        request = {
            "epoch": 0,
            "parent_root": "00" * 32,
            "contribution": values,
            "weight": weight,
            "companions": self.others,
            "should_stop": self.stop.is_set,
            "is_patient": self.swarm.config.role == "aux",
            "rank": lambda peer: int(peer.record.role != "aux"),
            "own_rank": int(self.swarm.config.role != "aux"),
            **changes,
        }
        return self.averager.round(RoundRequest(**request), self.stop)

    def refusals(self) -> list[str]:
        return [event["reason"] for event in self.log if event["event"] == "refused"]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.log if event["event"] == kind]


class ToySwarm:
    """Several peers that know each other."""

    def __init__(self, folder: Path, num_values: int, codec: str = "none", **strategy: Any) -> None:
        self.folder, self.num_values, self.settings = folder, num_values, settings(codec, **strategy)
        self.peers: list[ToyPeer] = []

    def add(
        self,
        role: str = "trainer",
        *,
        client_mode: bool = False,
        kind: type = ExactAverager,
        name: str = "",
        bandwidth: Bandwidth | None = None,
        is_rumoured: bool = False,
    ) -> ToyPeer:
        folder = StateFolder(self.folder / f"peer-{len(self.peers)}")
        events = EventLog(folder.events)
        addresses = tuple(peer.swarm.addresses[0] for peer in self.peers[:1])
        config = SwarmConfig(
            role=role,  # type: ignore[arg-type]
            host_maddrs=(LOOPBACK,),
            client_mode=client_mode,
            initial_peers=() if is_rumoured else addresses,
            rumoured_peers=addresses if is_rumoured else (),
            name=name,
        )
        swarm = Swarm(config, folder, events)
        swarm.connect()
        swarm.join(RUN_HASH)
        averager = kind(swarm, self.settings, layout_hash=LAYOUT_HASH, lengths=[self.num_values], bandwidth=bandwidth)
        peer = ToyPeer(swarm, averager)
        events.listen(peer.log.append)
        self.peers.append(peer)
        return peer

    def meet(self) -> None:
        """Wait until everyone sees everyone."""
        deadline = time.monotonic() + 20
        while any(len(peer.others()) < len(self.peers) - 1 for peer in self.peers):
            assert time.monotonic() < deadline, [len(peer.others()) for peer in self.peers]
            time.sleep(0.05)

    def rounds(self, *arguments: tuple[torch.Tensor | None, float] | None, **changes: Any) -> list[RoundOutcome]:
        """Everyone takes part in one round at the same time; None stays away."""
        with ThreadPoolExecutor(len(self.peers)) as pool:
            futures = [
                pool.submit(peer.round, *given, **changes)
                for peer, given in zip(self.peers, arguments, strict=True)
                if given is not None
            ]
            return [future.result(timeout=60) for future in futures]

    def close(self) -> None:
        for peer in self.peers:
            peer.stop.set()
        for peer in reversed(self.peers):
            peer.swarm.close()
