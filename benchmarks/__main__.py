"""Measure one suite: prints a table, writes JSON and a plot. Repetitions already in the JSON are not measured again."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import averaging, round_trip
from benchmarks.record import Record

SUITES = {"averaging": averaging.SUITE, "round": round_trip.SUITE}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="*", choices=[[], *sorted(SUITES)], help="default: all")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="folder for JSON and plots")
    parser.add_argument("--repeats", type=int, default=5, help="how often every arm is measured")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    arguments = parser.parse_args()
    for name in arguments.suite or sorted(SUITES):
        record = Record.open(arguments.output / f"{name}.json", is_fresh=arguments.fresh)
        print(f"\n{name}: {record.describe()}")
        suite = SUITES[name]
        suite.run(record, arguments.repeats)
        print(f"\n{suite.table(record)}")
        suite.plot(record, arguments.output / f"{name}.svg")
        print(f"\nWritten: {record.path} and {arguments.output / name}.svg")


main()
