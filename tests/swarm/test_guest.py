"""A good guest in a real run: memory that runs out, a time limit, an upload cap, a contribution that is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from conftest import SwarmOfProcesses
from processes import write_run

MEGABYTES_PER_SECOND = 2.0
HOURS = 0.008


def install_hungry(folder: Path) -> dict[str, str]:
    """The task as pip would leave it."""
    folder.mkdir()
    (folder / "hungry.py").write_text((Path(__file__).parent / "hungry.py").read_text())
    metadata = folder / "hungry-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hungry\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[collab.tasks]\nhungry = hungry:Hungry\n")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "MALLOC_ARENA_MAX": "2",  # each thread's own would take 64 MB of the addresses that are limited
    }


@pytest.mark.timeout(240)
def test_a_guest_with_little_memory_and_time_goes_on_and_keeps_what_it_gave(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    env = install_hungry(tmp_path / "packages")
    run = write_run(tmp_path, task__name="hungry:Hungry", task__options__width=256, strategy__target_batch_size=16)
    aux = swarm.aux(run, "aux", "--max-upload", str(8 * MEGABYTES_PER_SECOND), env=env)

    # memory runs out at 16 and at 8 samples at once; four at once are added up to the same batch
    guest = swarm.trainer("guest", "--batch-size", "16", "--nice", "7", env=env)
    assert guest.wait_for("epoch", lambda event: event["epoch"] >= 2)["samples"] == 16
    assert [(event["rows"], event["next_rows"]) for event in guest.events("out_of_memory")] == [(16, 8), (8, 4)]
    assert "Memory ran out with 8 samples at once: going on with 4 at once" in guest.log.read_text()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, guest.process.pid) == min(own + 7, 19)
    assert {daemon.nice() for daemon in guest.descendants()} == {own}  # others wait for the network

    # it is killed, and its state is gone; its key is not, and neither is what it gave
    account = guest.state_dir / "identity.contribution.json"
    guest.wait_for("epoch", lambda event: account.exists())
    guest.kill()
    [before] = json.loads(account.read_text()).values()
    assert before["samples"] == 16 * before["epochs"] > 0
    (guest.state_dir / "backup.collab").unlink(missing_ok=True)

    # it comes back, and fetches the state from the only one who has it, no faster than that one gives
    num_events = len(guest.events())
    guest = swarm.trainer("guest", env=env)
    fetched = guest.wait_for("resynced", after=num_events)
    assert fetched["bytes"] > 8e6
    assert fetched["bytes"] / fetched["seconds"] < 1.5 * MEGABYTES_PER_SECOND * 1e6  # the first megabytes are free
    guest.wait_for("epoch", after=num_events)
    assert guest.stop() == 0, guest.tail()
    left = guest.wait_for_last("left")
    assert left["samples"] == before["samples"] + left["samples_now"] > before["samples"]
    assert left["epochs"] == before["epochs"] + left["epochs_now"]

    # it comes for some seconds, and leaves by itself before they are over
    started = time.monotonic()
    guest = swarm.trainer("guest", "--hours", str(HOURS), env=env)
    assert guest.process.wait(HOURS * 3600 + 15) == 0, guest.tail()
    assert time.monotonic() - started < HOURS * 3600 + 5  # a tenth of its time is little for leaving on a busy machine
    assert len(guest.events("left")) == 2
    assert f"Leaving in {HOURS * 3600 * 0.9:.0f} s: --hours {HOURS}." in guest.log.read_text()
    assert aux.stop() == 0
