"""Seconds per averaging round between two processes on loopback: Collab against stock hivemind, in one run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_VALUES = 5_000_000
NUM_ROUNDS = 8
ARMS = ("stock hivemind", "collab")
TIMEOUT_S = 180


def run() -> dict[str, Any]:
    """Both arms, one after the other; the first round of each is a warm-up."""
    seconds: dict[str, list[float]] = {}
    identical: dict[str, bool] = {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory(prefix="collab-bench-") as folder:
            command = [sys.executable, "-m", "benchmarks.averaging_peer", arm, folder]
            workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
            try:
                reports = [json.loads(worker.communicate(timeout=TIMEOUT_S)[0]) for worker in workers]
            finally:
                for worker in workers:
                    worker.kill()
            seconds[arm] = [max(times) for times in zip(*(report["seconds"] for report in reports), strict=True)][1:]
            identical[arm] = reports[0]["digests"] == reports[1]["digests"]
    base = statistics.median(seconds[ARMS[0]])
    print(f"{NUM_VALUES / 1e6:.0f} M float32 values as fp16, 2 processes, median of {NUM_ROUNDS - 1} rounds")
    print(f"{'':<16} {'seconds':>8} {'ratio':>6}  same bytes on both")
    for arm in ARMS:
        median = statistics.median(seconds[arm])
        print(f"{arm:<16} {median:>8.3f} {median / base:>6.2f}  {'yes' if identical[arm] else 'no'}")
    return {"num_values": NUM_VALUES, "seconds": seconds, "identical": identical}


def peer_address_file(folder: str) -> Path:
    return Path(folder) / "address"
