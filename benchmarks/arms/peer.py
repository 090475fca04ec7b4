"""A place in a swarm of our own for a benchmark's process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.team import LOOPBACK, Team
from collab_core.state.folder import StateFolder
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.telemetry import EventLog


@contextlib.contextmanager
def open_swarm(team: Team) -> Iterator[Swarm]:
    """Joined, and everybody sees everybody."""
    initial_peers = tuple(team.hear("address", 0).split()) if team.rank else ()
    state = StateFolder(team.folder / f"state-{team.rank}")
    events = EventLog(state.events)
    swarm = Swarm(SwarmConfig(role="trainer", host_maddrs=(LOOPBACK,), initial_peers=initial_peers), state, events)
    try:
        swarm.connect()
        swarm.join(bytes(32))
        team.tell("address", swarm.addresses[0])
        while len(swarm.peers()) < team.size - 1:
            time.sleep(0.05)
        yield swarm
    finally:
        swarm.close()
        events.close()
        state.close()
