"""`collab doctor` names the true fault: the one thing that is wrong with a machine, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import SwarmOfProcesses
from processes import environment, write_run

import collab_core
from collab_core.run import Invite
from collab_core.swarm import Identity, friendly_name

from . import Host, Lab

pytestmark = pytest.mark.timeout(300)

PORT = 31330
FULL = "64k"

Told = dict[str, Any]


def own_shared_memory(size: str) -> tuple[str, ...]:
    """Before a command: it has a /dev/shm of this size, which is gone with it."""
    return ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"', "sh")


class Doctor:
    """One `collab doctor` on a host; several run at once."""

    def __init__(
        self, host: Host, *arguments: str, prefix: tuple[str, ...] = (), version: str = collab_core.__version__
    ) -> None:
        program = f"import collab_core; collab_core.__version__ = {version!r}; from collab_cli.app import main; main()"
        command = [*host.prefix, *prefix, sys.executable, "-c", program, "doctor", "--json", *arguments]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )

    def finish(self, exit_code: int) -> Told:
        out, words = self._process.communicate(timeout=200)
        assert self._process.returncode == exit_code, words
        told: Told = json.loads(out)
        assert {frozenset(check) for check in told["checks"]} == {frozenset({"name", "ok", "detail", "fix"})}
        return told


def faults(told: Told) -> dict[str, dict[str, str]]:
    """The checks that are not ok, by name."""
    return {check["name"]: check for check in told["checks"] if not check["ok"]}


def test_each_of_five_machines_is_told_what_is_wrong_with_it_and_nothing_else(
    lab: Lab, swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        pytest.skip("the clock of one process is set by libfaketime: apt-get install libfaketime")
    server, office, gone, walled = (lab.host(name) for name in ("server", "office", "gone", "walled"))
    home = lab.router("home")
    laptop = lab.host("laptop", home)
    for rule in ("INPUT -i lo -j ACCEPT", "INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT", "INPUT -j DROP"):
        walled.run("iptables", "-w", "-A", *rule.split()).check_returncode()
    gone.cut()
    swarm.aux(write_run(tmp_path), "aux", "--port", str(PORT), prefix=server.prefix)
    text = swarm.invite()
    silent, closed = (Identity.load_or_create(tmp_path / f"{name}.key").peer_id for name in ("silent", "closed"))
    places = (f"/ip4/{gone.ip}/tcp/4001/p2p/{silent}", f"/ip4/{server.ip}/tcp/4002/p2p/{closed}")
    stale = replace(Invite.decode(text), initial_peers=places).encode()
    # libfaketime leaves files in shared memory
    late_by_ten_minutes = (*own_shared_memory("1g"), "env", f"LD_PRELOAD={library}", "FAKETIME=+600s")
    doctors = [
        Doctor(office, text, "--port", "31331", "--role", "aux"),
        Doctor(laptop, text, "--port", "31332"),
        Doctor(walled, text, "--port", "31333", "--role", "aux", prefix=own_shared_memory(FULL)),
        Doctor(office, text, prefix=late_by_ten_minutes, version="9.9.0"),
        Doctor(office, stale),
    ]
    fine, nat, blocked, late, lost = (
        doctor.finish(code) for doctor, code in zip(doctors, (0, 0, 1, 1, 1), strict=True)
    )

    details = {check["name"]: check["detail"] for check in fine["checks"]}
    assert faults(fine) == {}
    assert fine["can"] == {"train": True, "aux": True}
    assert f"/ip4/{office.ip}/tcp/31331" in details["dial-back"]
    assert "Mbit/s down" in details["speed"]
    assert "parameters" in details["memory"]

    [hidden] = faults(nat).values()
    assert nat["can"] == {"train": True, "aux": False}
    assert "is behind NAT" in hidden["detail"]
    assert f"in the router ({home.ip}) forward TCP port 31332 to {laptop.ip} port 31332" in hidden["fix"]

    found = faults(blocked)
    assert found.keys() == {"dial-back", "shared memory"}
    assert blocked["can"] == {"train": False, "aux": False}
    assert "a firewall blocks TCP port 31333" in found["dial-back"]["detail"]
    assert f"let TCP port 31333 in at {walled.ip}" in found["dial-back"]["fix"]
    assert found["shared memory"]["detail"].startswith("/dev/shm is full: 66 kB of 66 kB are free")

    found = faults(late)
    assert found.keys() == {"clock", "version"}
    assert late["can"] == {"train": False, "aux": False}
    assert "10 min ahead of" in found["clock"]["detail"]
    assert found["version"]["detail"].startswith("Collab 9.9.0 is installed here, and the run's peers have ")
    assert f"pip install collab-train=={collab_core.__version__}" in found["version"]["fix"]

    found = faults(lost)
    assert lost["can"] == {"train": False, "aux": False}
    assert found.keys() == {f"peer {friendly_name(peer_id)}" for peer_id in (silent, closed)}
    first, second = (found[f"peer {friendly_name(peer_id)}"] for peer_id in (silent, closed))
    assert first["detail"].startswith(f"{gone.ip} port 4001: no answer")
    assert f"the machine {gone.ip} is on and its firewall lets TCP port 4001 in" in first["fix"]
    assert second["detail"] == f"{server.ip} port 4002: connection refused"
    assert "no peer listens on its TCP port 4002: ask the organiser to start `collab aux` again" in second["fix"]
