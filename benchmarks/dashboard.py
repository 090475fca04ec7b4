"""What 100 browsers cost the process that serves the dashboard.

python -m benchmarks.dashboard [--clients 100] [--peers 20] [--seconds 20]

With `--peers 0` that is a real auxiliary with two trainers (emulated devices, steps of 0.2 s), with more of them a
server that is told of so many peers, whose records all change every second. Fails if browsers take a fifth of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.processes import wait_until
from websockets.asyncio.client import connect

from benchmarks.devices import PROGRAM
from benchmarks.experiment import open_swarm
from collab_core.identity import Identity
from collab_core.run import Prepared, RunFolder, fingerprint
from collab_core.run.manifest import Manifest
from collab_core.swarm import Peer
from collab_core.swarm.record import PeerRecord
from collab_dashboard import Dashboard, Place, RunWatch

ROOT = "ab" * 32
MAX_SHARE = 0.2  # of a core, for all browsers
STEP_S = 0.2


def serve(num_peers: int) -> None:
    """The arm: a run whose peers all say something new every second; prints its address and ends with its input."""
    with tempfile.TemporaryDirectory() as folder:
        signed = RunFolder.create(Path(folder) / "run", 'name = "run"\n').signed_manifest(lambda *_: Prepared(ROOT))
        manifest: Manifest = signed.open(None, fingerprint(signed.claimed_organiser))
    people = [Identity(Ed25519PrivateKey.generate()).peer_id for _ in range(num_peers)]
    start = time.time()

    def peers() -> list[Peer]:
        epoch = int(time.time() - start)
        return [
            Peer(
                peer_id,
                PeerRecord(
                    name=f"peer {number}",
                    role="trainer",
                    mode="direct",
                    version="0.1.0",
                    phase="working",
                    time=time.time(),
                    epoch=epoch,
                    root=ROOT,
                    samples=epoch * number,
                    epoch_samples=epoch % 7 * 10,
                    samples_per_second=10 + epoch % 5,
                    loss=5 - epoch / 100,
                ),
                time.time() + 60,
            )
            for number, peer_id in enumerate(people)
        ]

    watch = RunWatch(manifest=manifest, invite=lambda: "collab1_" + 300 * "x", peers=peers)
    with Dashboard([watch], Place("127.0.0.1", 0).bind("--listen"), is_local=True) as served:
        print(served.url, flush=True)
        sys.stdin.read()


async def look(url: str, num_clients: int, seconds: float, process: psutil.Process) -> dict[str, float]:
    """So many clients, for so long."""
    address = url.replace("http", "ws") + "ws"
    num_messages = num_bytes = 0
    is_over = False

    async def client() -> None:
        nonlocal num_messages, num_bytes
        async with connect(address, compression=None) as socket:
            await socket.recv()
            while not is_over:
                message = await socket.recv()
                json.loads(message)
                num_messages += 1
                num_bytes += len(message)

    tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
    await asyncio.sleep(3)
    before, began, counted = process.cpu_times(), time.monotonic(), (num_messages, num_bytes)
    await asyncio.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - began
    is_over = True
    told, sent = num_messages - counted[0], num_bytes - counted[1]
    await asyncio.gather(*tasks)
    used = after.user + after.system - before.user - before.system
    per_client = told / max(num_clients, 1) / took
    return {
        "clients": num_clients,
        "share_of_a_core": round(used / took, 4),
        "updates_per_client_and_second": round(per_client, 2),
        "bytes_per_update": round(sent / told) if told else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.peers)
        return
    with told_of(arguments.peers) if arguments.peers else real_run() as (url, process):
        time.sleep(2)  # it is warm then
        shares = []
        for num_clients in (0, arguments.clients):
            result = asyncio.run(look(url, num_clients, arguments.seconds, process))
            print(json.dumps({"peers": arguments.peers, **result}), flush=True)
            shares.append(result["share_of_a_core"])
    if shares[1] - shares[0] >= MAX_SHARE:
        raise SystemExit(f"{arguments.clients} browsers cost {shares[1] - shares[0]:.0%} of a core.")


@contextlib.contextmanager
def told_of(num_peers: int) -> Iterator[tuple[str, psutil.Process]]:
    """A process that is told of so many peers: its address, and itself."""
    command = [sys.executable, "-m", "benchmarks.dashboard", "--serve", "--peers", str(num_peers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), psutil.Process(server.pid)


@contextlib.contextmanager
def real_run() -> Iterator[tuple[str, psutil.Process]]:
    """A run under way: the address of its auxiliary's dashboard, and the auxiliary."""
    with open_swarm('name = "run"\n') as swarm:
        aux = swarm.aux(swarm.folder / "run", "aux", "--dashboard", "127.0.0.1:0")
        trainers = [swarm.trainer(name, env={"PAD_S": str(STEP_S)}, program=PROGRAM) for name in ("first", "second")]
        for trainer in trainers:
            trainer.wait_for_epoch(3)
        address = re.compile(r"http://127.0.0.1:\d+/")
        wait_until(lambda: bool(address.search(aux.log.read_text())), "the dashboard's address")
        yield address.findall(aux.log.read_text())[0], psutil.Process(aux.process.pid)


if __name__ == "__main__":
    main()
