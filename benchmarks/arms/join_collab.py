"""Our exchange of state: everyone but the last holds it, the last one fetches it."""

from __future__ import annotations

import json
import threading
import time

import torch

from benchmarks.join import NUM_TENSORS, NUM_VALUES
from benchmarks.team import Team
from collab_core.state.exchange import Exchange, Sources
from collab_core.state.folder import StateFolder
from collab_core.state.snapshot import Snapshot
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.telemetry import EventLog

RUN_HASH = bytes(range(32))


def state(seed: int) -> Snapshot:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"model/w{n}": torch.randn(NUM_VALUES, generator=generator) for n in range(NUM_TENSORS)}
    return Snapshot(1, tensors)


def main() -> None:
    team, addresses = Team.from_argv()
    torch.set_num_threads(1)
    is_joiner = team.rank == team.size - 1
    folder = StateFolder(team.folder / f"state-{team.rank}")
    first = (team.hear("address", 0),) if team.rank else ()
    config = SwarmConfig(role="trainer", host_maddrs=(addresses[team.rank],), initial_peers=first)
    swarm = Swarm(config, folder, EventLog(folder.events))
    swarm.connect()
    swarm.join(RUN_HASH)
    team.tell("address", swarm.addresses[0])
    team.tell("peer", swarm.peer_id)
    exchange = Exchange(swarm)
    wanted, own = state(1), state(2)
    report = {"seconds": 0.0, "bytes": 0}
    if not is_joiner:
        exchange.serve_state(wanted, {})
    donors = [team.hear("peer", rank) for rank in range(team.size - 1)]
    while len(swarm.peers()) < team.size - 1:
        time.sleep(0.1)
    team.meet("ready")
    if is_joiner:
        faults: dict[str, str] = {}
        sources = Sources(holders=lambda: donors, on_bad_donor=faults.__setitem__)
        start = time.perf_counter()
        fetched = exchange.fetch_state(wanted.root, sources, own, folder.download, threading.Event())
        seconds = time.perf_counter() - start
        assert fetched is not None, faults
        assert Snapshot(1, fetched.tensors).root == wanted.root
        report = {"seconds": seconds, "bytes": fetched.num_bytes}
    team.meet("done")
    swarm.close()
    folder.close()
    print(json.dumps(report))


main()
