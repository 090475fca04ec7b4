"""One process of the averaging benchmark: `python -m benchmarks.averaging_peer ARM FOLDER RANK`."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.averaging import NUM_ROUNDS, NUM_VALUES, peer_address_file

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def main() -> None:
    arm, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(rank))
    seconds, digests = (run_collab if arm == "collab" else run_hivemind)(values, folder, rank)
    print(json.dumps({"seconds": seconds, "digests": digests}))


def first_address(folder: str, rank: int) -> list[str]:
    """Rank 0 is the first peer; the others wait for its address."""
    path = peer_address_file(folder)
    while rank and not path.exists():
        time.sleep(0.05)
    return path.read_text().split() if rank else []


def meet(folder: str, rank: int, number: int) -> None:
    """Both begin a round together: waiting for each other is not averaging."""
    (Path(folder) / f"ready-{rank}-{number}").touch()
    while not (Path(folder) / f"ready-{1 - rank}-{number}").exists():
        time.sleep(0.002)


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def run_collab(values: torch.Tensor, folder: str, rank: int) -> tuple[list[float], list[str]]:
    from collab_core.averaging import ExactAverager, RoundRequest
    from collab_core.run import RunSettings
    from collab_core.state.folder import StateFolder
    from collab_core.swarm import Swarm, SwarmConfig
    from collab_core.telemetry import EventLog

    state = StateFolder(Path(folder) / str(rank))
    config = SwarmConfig(role="trainer", host_maddrs=(LOOPBACK,), initial_peers=tuple(first_address(folder, rank)))
    swarm = Swarm(config, state, EventLog(state.events))
    swarm.connect()
    swarm.join(bytes(32))
    averager = ExactAverager(swarm, RunSettings(name="bench"), layout_hash=bytes(32), num_values=NUM_VALUES)
    if rank == 0:
        peer_address_file(folder).write_text(swarm.addresses[0])
    while not swarm.peers():
        time.sleep(0.05)
    stop = threading.Event()
    seconds, digests = [], []
    for number in range(NUM_ROUNDS):
        meet(folder, rank, number)
        start = time.perf_counter()
        request = RoundRequest(
            epoch=number,
            parent_root="00" * 32,
            contribution=values,
            weight=1.0,
            companions=swarm.peers,
            should_stop=stop.is_set,
        )
        outcome = averager.round(request, stop)
        assert outcome.average is not None, outcome.failure
        values = outcome.average
        seconds.append(time.perf_counter() - start)
        digests.append(digest(values))
        averager.set_epoch(number + 1)
    meet(folder, rank, NUM_ROUNDS)
    swarm.close()
    return seconds, digests


def run_hivemind(values: torch.Tensor, folder: str, rank: int) -> tuple[list[float], list[str]]:
    import hivemind

    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    dht = hivemind.DHT(initial_peers=first_address(folder, rank), start=True, host_maddrs=[LOOPBACK])
    averager = hivemind.DecentralizedAverager(
        [values],
        dht,
        start=True,
        prefix="bench",
        target_group_size=2,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=hivemind.Float16Compression(),
    )
    if rank == 0:
        peer_address_file(folder).write_text(str(dht.get_visible_maddrs()[0]))
    seconds, digests = [], []
    for number in range(NUM_ROUNDS):
        meet(folder, rank, number)
        start = time.perf_counter()
        assert averager.step(weight=1.0, timeout=60) is not None
        seconds.append(time.perf_counter() - start)
        with averager.get_tensors() as tensors:
            digests.append(digest(tensors[0]))
    meet(folder, rank, NUM_ROUNDS)
    averager.shutdown()
    dht.shutdown()
    return seconds, digests


main()
