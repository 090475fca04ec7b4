"""From one typed line to the first sample in the model: what a volunteer waits for, with a wheel.

python -m benchmarks.first_sample [--repeats 3]

Builds the wheel of this clone, installs it with what it needs into a new environment, and starts an auxiliary and a
trainer of a new run there. Then, with that run under way, somebody who was never here types `collab train INVITE`. The
clock runs from there to the end of the first epoch that has a sample of theirs in it. Installing is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from tests.installing import SOURCE, build_wheel
from tests.processes import PeerProcess, SwarmOfProcesses

PARTS = {
    "start Python, connect": "reachability",
    "load torch, choose a batch size": "tuned",
    "see who is there, fetch the state": "joined",
    "work, average, update": "epoch",
}
"""What a volunteer waits for, in turn, and the event that ends it."""
PROMISED_S = 60.0


def install(folder: Path) -> Path:
    """A new environment with the wheel of this clone; returns its Python."""
    wheel = build_wheel(folder)
    venv.create(folder / "clean", with_pip=True)
    python = folder / "clean" / "bin" / "python"
    constraints = str(SOURCE / "constraints.txt")
    subprocess.run([str(python), "-m", "pip", "install", "-qq", "--constraint", constraints, str(wheel)], check=True)
    return python


def join(python: Path, folder: Path) -> dict[str, float]:
    """One newcomer to one run; seconds of every part."""
    subprocess.run([str(python.parent / "collab"), "new", str(folder / "run")], check=True, stdout=subprocess.DEVNULL)
    swarm = SwarmOfProcesses(folder)
    options: dict[str, Any] = {"python": str(python), "program": (str(python.parent / "collab"),)}
    try:
        swarm.aux(folder / "run", **options)
        swarm.trainer("somebody", **options).wait_for_epoch(3)
        begun = time.time()
        newcomer = swarm.start("newcomer", "train", swarm.invite(), "--name", "newcomer", **options)
        return _parts(newcomer, begun)
    finally:
        swarm.close()


def _parts(newcomer: PeerProcess, begun: float) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for part, event in PARTS.items():
        ended = newcomer.wait_for(event, lambda seen: "newcomer" in seen.get("members", {"newcomer"}))["time"]
        seconds[part] = ended - begun
        begun = ended
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_sample", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="collab-first-") as name:
        begun = time.monotonic()
        python = install(Path(name))
        print(f"installed in {time.monotonic() - begun:.0f} s", flush=True)
        visits = []
        for repeat in range(arguments.repeats):
            (folder := Path(name) / str(repeat)).mkdir()
            visits.append(join(python, folder))
            print(f"{repeat + 1}/{arguments.repeats}: {sum(visits[-1].values()):.1f} s", flush=True)
    print("\n| part | seconds (median) | best – worst |\n| --- | --- | --- |")
    rows = {part: [visit[part] for visit in visits] for part in PARTS}
    rows["**all**"] = [sum(visit.values()) for visit in visits]
    for part, seconds in rows.items():
        print(f"| {part} | {statistics.median(seconds):.1f} | {min(seconds):.1f} – {max(seconds):.1f} |")
    if (took := statistics.median(rows["**all**"])) > PROMISED_S:
        raise SystemExit(f"\nIt took {took:.0f} s, and at most {PROMISED_S:.0f} s are promised.")


if __name__ == "__main__":
    main()
