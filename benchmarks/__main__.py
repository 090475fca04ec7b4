"""`python -m benchmarks [SUITE]`: prints a table and writes JSON beside it."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

from benchmarks import averaging

SUITES = {"averaging": averaging.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="?", default="averaging", choices=sorted(SUITES))
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="folder for the JSON")
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("collab-train", "hivemind", "torch", "numpy")}
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"{arguments.suite} on {machine}; " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    result = SUITES[arguments.suite]()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.suite}.json"
    path.write_text(json.dumps({"machine": machine, "versions": versions, **result}, indent=2))
    print(f"written to {path}")


main()
