"""What 100 browsers cost the process that serves the dashboard, with every record of the run changing every second.

python -m benchmarks.dashboard [--clients 100] [--peers 20] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import connect

from collab_core.identity import Identity
from collab_core.run import Prepared, RunFolder, fingerprint
from collab_core.run.manifest import Manifest
from collab_core.swarm import Peer
from collab_core.swarm.record import PeerRecord
from collab_dashboard import Dashboard, Place, RunWatch

ROOT = "ab" * 32


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
    command = [sys.executable, "-m", "benchmarks.dashboard", "--serve", "--peers", str(arguments.peers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        time.sleep(2)  # it is warm then
        for num_clients in (0, arguments.clients):
            result = asyncio.run(look(url, num_clients, arguments.seconds, psutil.Process(server.pid)))
            print(json.dumps({"peers": arguments.peers, **result}))


if __name__ == "__main__":
    main()
