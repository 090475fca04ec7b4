"""Seconds until a newcomer has a 100 MB state, from donors with home uplinks of 20 Mbit/s.

Every peer is a host of its own in the lab (network namespaces, needs root). hivemind downloads from one donor,
however many there are; ours from all of them.
"""

from __future__ import annotations

import statistics

from benchmarks.record import Entry
from benchmarks.suite import Suite
from benchmarks.team import run_team

NUM_TENSORS = 200
NUM_VALUES = 125_000  # per tensor: 100 MB in all
UPLINK_MBIT = 20
TIMEOUT_S = 300
NUM_DONORS = {"hivemind": 1}  # more would only stand by


def measure(arm: str, size: int) -> Entry:
    from tests.lab import Lab

    num_donors = NUM_DONORS.get(arm, size)
    with Lab() as lab:
        hosts = [lab.host(f"h{rank}") for rank in range(num_donors + 1)]
        for host in hosts[:-1]:
            host.limit(up_mbit=UPLINK_MBIT)
        addresses = [f"/ip4/{host.ip}/tcp/0" for host in hosts]
        prefixes = [host.prefix for host in hosts]
        reports = run_team(f"benchmarks.arms.join_{arm}", addresses, len(hosts), TIMEOUT_S, prefixes)
    return reports[-1]


def _megabytes(entries: list[Entry]) -> str:
    return f"{statistics.median(entry['bytes'] for entry in entries) / 1e6:.1f}"


SUITE = Suite(
    title="Fetching a 100 MB state from donors with 20 Mbit/s uplinks",
    sizes=(4, 8),
    unit_of_size="donors",
    arms=("hivemind", "collab"),
    measure=measure,
    compared_with=("hivemind",),
    columns={"MB fetched": _megabytes},
)
