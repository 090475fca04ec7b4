"""Suites whose arms are whole runs: real peers as real processes, each arm once per seed, figures from event logs."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import PeerProcess, SwarmOfProcesses

from benchmarks.record import Entry, Record
from benchmarks.suite import MAX_STARTS
from benchmarks.team import TeamFailed
from collab_core.run import RunFolder

Column = Callable[[list[Entry], Record], str]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question, asked of several runs."""

    title: str
    unit: str
    """Of what is plotted."""
    arms: tuple[str, ...]
    measure: Callable[[str, int, float], Entry]
    """(arm, seed, length) → what the table wants, and "value"."""
    columns: Mapping[str, Column]
    """Heading → what stands there, from all seeds of one arm and the whole record."""
    has_times: bool
    """Whether the figures depend on the machine. If not, one goes on where another was stopped."""
    length: float = 1.0
    """Of every run, relative to the one in the docs."""
    until: float = math.inf
    """No run begins after this time."""

    def run(self, record: Record, num_repeats: int) -> None:
        """Every arm in turn, seed by seed."""
        for seed in range(num_repeats):
            for arm in self.arms:
                if record.entries_of(arm=arm, seed=seed):
                    continue
                if time.monotonic() > self.until:
                    print("The time is up; the next call goes on here.")
                    return
                if (entry := self._measure(arm, seed)) is None:
                    continue
                record.add({"arm": arm, "seed": seed, **entry})
                print(f"{seed + 1}/{num_repeats} {arm}: {entry['value']:.4g} ({self.unit})", flush=True)

    def _measure(self, arm: str, seed: int) -> Entry | None:
        """One run. One that fails is made again, and counted; the next call tries those again that failed too often."""
        for num_failed in range(MAX_STARTS):
            try:
                return {**self.measure(arm, seed, self.length), "failed_starts": num_failed}
            except TeamFailed as error:
                print(f"{arm}: {error}", flush=True)
        print(f"{arm} failed {MAX_STARTS} times in a row; its own words are above.", flush=True)
        return None

    def table(self, record: Record) -> str:
        headings = ["arm", *self.columns, "failed starts"]
        rows = [headings, ["---"] * len(headings)]
        for arm in self.arms:
            if entries := record.entries_of(arm=arm):
                failed = f"{sum(entry['failed_starts'] for entry in entries)} of {len(entries)}"
                rows.append([arm, *(column(entries, record) for column in self.columns.values()), failed])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.plotting import bars

        values = {arm: [entry["value"] for entry in record.entries_of(arm=arm)] for arm in self.arms}
        if measured := {arm: found for arm, found in values.items() if found}:
            bars({"": measured}, title=self.title, unit=self.unit, path=path)


@contextlib.contextmanager
def open_swarm(run: str) -> Iterator[SwarmOfProcesses]:
    """A place for the processes of one run, whose folder is `run`; none of them outlives the block.

    With COLLAB_BENCH_LOGS=FOLDER in the environment everything they wrote is kept there.
    """
    with tempfile.TemporaryDirectory(prefix="collab-bench-") as name:
        folder = Path(name)
        RunFolder.create(folder / "run", run)
        swarm = SwarmOfProcesses(folder)
        try:
            try:
                yield swarm
            finally:
                swarm.close()
                if logs := os.environ.get("COLLAB_BENCH_LOGS"):
                    shutil.copytree(folder, Path(logs) / folder.name)
        except (AssertionError, subprocess.TimeoutExpired) as error:  # who did not get to its end, or stayed behind
            raise TeamFailed(str(error)) from error


def spread(key: str, form: str = "{:.1f}") -> Column:
    """A column with the mean over the seeds, and the smallest and largest if there are several."""

    def column(entries: list[Entry], record: Record) -> str:
        values = [entry[key] for entry in entries]
        text = form.format(statistics.mean(values))
        return f"{text} ({form.format(min(values))} – {form.format(max(values))})" if len(values) > 1 else text

    return column


def conflicting_roots(peers: list[PeerProcess]) -> int:
    """Epochs for which two peers, dead or alive, wrote different roots."""
    roots: dict[int, set[str]] = {}
    for peer in peers:
        for epoch, root in peer.roots().items():
            roots.setdefault(epoch, set()).add(root)
    return sum(len(found) > 1 for found in roots.values())
