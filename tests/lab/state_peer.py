"""A peer that has a state or fetches it, on a host of the lab. It prints one JSON document per line.

state_peer.py donor FOLDER ADDRESS [FIRST]            serves until it is killed; LIE=1 serves wrong bytes;
                                                      STEPS=1 also works, telling its steps per second
state_peer.py joiner FOLDER ADDRESS FIRST DONOR…      fetches, telling its progress; WAIT=1 once a line comes in
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from collab_core.state.exchange import Exchange, Progress, Sources
from collab_core.state.folder import StateFolder
from collab_core.state.snapshot import Snapshot
from collab_core.swarm import Swarm, SwarmConfig
from collab_core.telemetry import EventLog

NUM_TENSORS, NUM_VALUES = 16, 2**18  # a chunk each: 17 MB


def state(seed: int) -> Snapshot:
    generator = torch.Generator().manual_seed(seed)
    return Snapshot(1, {f"model/w{n}": torch.randn(NUM_VALUES, generator=generator) for n in range(NUM_TENSORS)})


def lying() -> type[Exchange]:
    """One that gives zeros. It has the same name, as that is what others call."""
    honest = Exchange

    class Exchange_(honest):
        async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=bytes(len((await super().rpc_chunks(request, context)).value)))

    Exchange_.__name__ = honest.__name__
    return Exchange_


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def take_steps() -> None:
    """A second of padded steps: some arithmetic, and the rest as if a GPU did it."""
    weights = torch.randn(256, 256)
    count, start = 0, time.monotonic()
    while time.monotonic() - start < 1:
        weights = torch.tanh(weights @ weights / 16)
        time.sleep(0.05)
        count += 1
    tell(steps_per_second=count / (time.monotonic() - start))


def main() -> None:
    role, path, address, *peers = sys.argv[1:]
    torch.set_num_threads(1)
    folder = StateFolder(Path(path))
    config = SwarmConfig(role="trainer", host_maddrs=(address,), initial_peers=tuple(peers[:1]))
    swarm = Swarm(config, folder, EventLog(folder.events))
    swarm.connect()
    swarm.join(bytes(range(32)))
    exchange = (lying() if os.environ.get("LIE") else Exchange)(swarm)
    wanted = state(1)
    if role == "donor":
        exchange.serve_state(wanted, {})
        tell(address=swarm.addresses[0], peer_id=swarm.peer_id)
        while True:
            take_steps() if os.environ.get("STEPS") else time.sleep(1)
    bad: dict[str, str] = {}

    def on_progress(progress: Progress) -> None:
        tell(share=progress.num_bytes / wanted_bytes)

    wanted_bytes = sum(tensor.nbytes for tensor in wanted.tensors.values())
    donors = peers[1:]
    while not set(donors) <= {peer.peer_id for peer in swarm.peers()}:
        time.sleep(0.05)
    sources = Sources(holders=lambda: donors, on_bad_donor=bad.__setitem__, on_progress=on_progress)
    if os.environ.get("WAIT"):
        tell(share=0.0)
        sys.stdin.readline()
    start = time.monotonic()
    fetched = exchange.fetch_state(wanted.root, sources, state(2), folder.download, threading.Event())
    seconds = time.monotonic() - start
    assert fetched is not None, bad
    root = Snapshot(1, fetched.tensors).root
    tell(
        seconds=seconds,
        bytes=fetched.num_bytes,
        lost_bytes=fetched.lost_bytes,
        late_bytes=fetched.late_bytes,
        is_right=root == wanted.root,
        donors=list(fetched.donors),
        bad=bad,
        size=wanted_bytes,
    )
    swarm.close()


main()
