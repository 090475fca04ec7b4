"""Measure one suite: prints a table, writes JSON and a plot. Repetitions already in the JSON are not measured again."""

from __future__ import annotations

import argparse
import importlib.util
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import archive, averaging, churn, gossip, growth, join, links, loss, poison, round_trip, unequal
from benchmarks.experiment import Experiment
from benchmarks.record import Record
from benchmarks.suite import Suite

SUITES: dict[str, Suite | archive.ArchiveSuite | Experiment | growth.GrowthSuite | loss.LossSuite] = {
    "archive": archive.SUITE,
    "averaging": averaging.SUITE,
    "churn": churn.SUITE,
    "gossip": gossip.SUITE,
    "growth": growth.SUITE,
    "join": join.SUITE,
    "links": links.SUITE,
    "loss": loss.LIBRARY,
    "loss-corpus": loss.CORPUS,
    "poison": poison.SUITE,
    "round": round_trip.SUITE,
    "unequal": unequal.SUITE,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="*", choices=[[], *sorted(SUITES)], help="default: all")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="folder for JSON and plots")
    parser.add_argument(
        "--repeats", type=int, default=5, help="how often every arm is measured, each time with another seed"
    )
    parser.add_argument("--arms", nargs="+", default=(), help="only these, and those they are compared with")
    parser.add_argument("--length", type=float, default=1.0, help="of whole runs, e.g. 0.1 to try whether one works")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further whole run after this long")
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        how = ".venv/bin/pip install --constraint constraints.txt --editable '.[bench]'"
        parser.exit(2, f"What draws the plots is missing. Install it: {how}\n")
    until = time.monotonic() + 60 * arguments.minutes
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the same way out, so that nothing is left behind
    for name in arguments.suite or sorted(SUITES):
        suite = SUITES[name]
        if isinstance(suite, Experiment):
            suite = replace(suite, length=arguments.length, until=until)
            name = name if arguments.length == 1 else f"{name}-{arguments.length:g}"
        if isinstance(suite, Suite) and arguments.arms:
            if unknown := set(arguments.arms) - set(suite.arms):
                parser.error(f"{name} has no arm {', '.join(sorted(unknown))}; it has {', '.join(suite.arms)}")
            wanted = {*arguments.arms, *suite.compared_with}
            suite = replace(suite, arms=tuple(arm for arm in suite.arms if arm in wanted))
        record = Record.open(arguments.output / f"{name}.json", is_fresh=arguments.fresh, has_times=suite.has_times)
        print(f"\n{name}: {record.describe()}")
        suite.run(record, arguments.repeats)
        print(f"\n{suite.table(record)}")
        suite.plot(record, arguments.output / f"{name}.svg")
        print(f"\nWritten: {record.path} and {arguments.output / name}.svg")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept; the same command goes on there.", file=sys.stderr)
        sys.exit(130)
