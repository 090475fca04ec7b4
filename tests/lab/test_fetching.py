"""Fetching a state over slow uplinks: together donors are quicker, and a donor or joiner that dies costs little."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import Host, Lab

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "state_peer.py"
CHUNK = 2**20
UPLINK_MBIT = 20
MAX_IN_FLIGHT = 3 * CHUNK  # of one donor: half a second of such an uplink, and the chunk that comes next
HEADERS = 1.08  # what travels for each byte of a chunk, with everything that peers tell each other meanwhile

Report = dict[str, Any]


class Crowd:
    """Donors, each on a host with a slow uplink, and a newcomer."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self._processes: list[subprocess.Popen[str]] = []
        self.donors: dict[str, subprocess.Popen[str]] = {}
        self._first = ""

    def _start(self, host: Host, *arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*host.prefix, sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLLAB_EXIT_WITH_PARENT": "1", **env},
        )
        self._processes.append(process)
        return process

    def add_donors(self, count: int, **env: str) -> list[str]:
        """Their peer IDs. They start together; the very first one has to be there before the others."""
        return [self._note(process) for process in [self._start_donor(**env) for _ in range(count)]]

    def _start_donor(self, **env: str) -> subprocess.Popen[str]:
        name = f"donor{len(self._processes)}"
        host = self._lab.host(name)
        host.limit(up_mbit=UPLINK_MBIT)
        first = (self._first,) if self._first else ()
        return self._start(host, "donor", str(self._folder / name), f"/ip4/{host.ip}/tcp/0", *first, **env)

    def _note(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        self._first = self._first or told["address"]
        self.donors[told["peer_id"]] = process
        return str(told["peer_id"])

    def prepare(self, name: str) -> subprocess.Popen[str]:
        """A newcomer that has started and waits for a line."""
        host = self._lab.host(name)
        arguments = ("joiner", str(self._folder / name), f"/ip4/{host.ip}/tcp/0", self._first, *self.donors)
        return self._start(host, *arguments, WAIT="1")

    def join(self, name: str = "joiner", on_share: Callable[[float], bool] = lambda share: False) -> Report | None:
        """The newcomer's report; None if `on_share` said that it should die."""
        host = self._lab.host(f"{name}-{len(self._processes)}")
        arguments = ("joiner", str(self._folder / name), f"/ip4/{host.ip}/tcp/0", self._first, *self.donors)
        process = self._start(host, *arguments)
        assert process.stdout is not None
        before = host.counters()
        for line in process.stdout:
            told: Report = json.loads(line)
            if "share" not in told:
                process.wait()
                return {**told, "received": (host.counters() - before).received}
            if on_share(told["share"]):
                process.kill()
                process.wait()
                return None
        raise AssertionError(f"the newcomer ended with {process.wait()}")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def crowd(lab: Lab, tmp_path: Path) -> Iterator[Crowd]:
    made = Crowd(lab, tmp_path)
    yield made
    made.close()


def test_many_donors_are_quicker_than_one_and_dying_ones_cost_what_was_in_flight(crowd: Crowd) -> None:
    (first,) = crowd.add_donors(1)
    alone = crowd.join("alone")
    assert alone is not None
    assert (alone["is_right"], alone["bytes"]) == (True, alone["size"])
    others = crowd.add_donors(3)
    together = crowd.join("together")
    assert together is not None
    assert together["is_right"]
    assert set(together["donors"]) == {first, *others}
    assert together["seconds"] < 0.7 * alone["seconds"]

    victims = iter(others)
    limits = iter((0.1, 0.5, 0.9))
    next_limit = next(limits)

    def kill_at(share: float) -> bool:
        nonlocal next_limit
        if share >= next_limit:
            crowd.donors[next(victims)].kill()
            next_limit = next(limits, 2.0)
        return False

    survived = crowd.join("survivor", kill_at)
    assert survived is not None
    assert survived["is_right"]
    # what the last one to die was still asked for, somebody else may have given by then: it lost nothing
    assert survived["lost_bytes"].keys() <= survived["bad"].keys() <= set(others)
    assert survived["lost_bytes"]  # at least one was in the middle of something
    assert all(lost <= MAX_IN_FLIGHT for lost in survived["lost_bytes"].values())
    assert survived["bytes"] <= survived["size"] + survived["late_bytes"]
    # and as the cable counts it: nothing came again but what was under way from the dead, or asked twice at the end
    again = sum(survived["lost_bytes"].values()) + survived["late_bytes"]
    assert survived["received"] <= HEADERS * (survived["size"] + again), survived


def test_a_liar_is_named_and_an_interrupted_join_goes_on_where_it_was(crowd: Crowd) -> None:
    honest = crowd.add_donors(1)
    (liar,) = crowd.add_donors(1, LIE="1")
    assert crowd.join("newcomer", lambda share: share >= 0.5) is None
    resumed = crowd.join("newcomer")
    assert resumed is not None
    assert resumed["is_right"]
    assert resumed["bytes"] <= 0.5 * resumed["size"] + resumed["late_bytes"]
    assert resumed["bad"] == {liar: "sent bytes that do not match their hash"}
    assert resumed["donors"] == honest


def drain(process: subprocess.Popen[str]) -> None:
    """Skip what was told before now."""
    assert process.stdout is not None
    while select.select([process.stdout], [], [], 0.05)[0]:
        process.stdout.readline()


def test_training_goes_on_while_newcomers_fetch(crowd: Crowd) -> None:
    (trainer,) = crowd.add_donors(1, STEPS="1")
    newcomers = [crowd.prepare(f"new{number}") for number in range(4)]
    for newcomer in newcomers:
        assert newcomer.stdout is not None
        newcomer.stdout.readline()

    def steps_per_second(num_seconds: int) -> float:
        told = crowd.donors[trainer].stdout
        assert told is not None
        return statistics.median(json.loads(told.readline())["steps_per_second"] for _ in range(num_seconds))

    drain(crowd.donors[trainer])
    before = steps_per_second(5)
    for newcomer in newcomers:
        assert newcomer.stdin is not None
        newcomer.stdin.write("now\n")
        newcomer.stdin.flush()
    during = [steps_per_second(5)]
    while during[-1] < 0.9 * before:  # other tests hold it up for a while; newcomers would all the time
        assert len(during) < 3, (before, during)
        during.append(steps_per_second(5))
    shares = [json.loads(newcomer.stdout.readline())["share"] for newcomer in newcomers if newcomer.stdout is not None]
    assert all(share > 0 for share in shares)  # they did fetch meanwhile
