"""What a peer pays for the others as a swarm grows: real processes from 2 to 16, simulated peers up to 256.

The processes are those of `round`: trainers with emulated work and a small model (8320 values, fp16). They share one
host of the lab (needs root), whose loopback interface counts every byte they send each other. The simulation (see
`benchmarks.simulated`) runs the same directory, matchmaking and reduction in one process, also with a model that is
large enough for every peer to reduce a share of it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.record import Entry, Record
from benchmarks.round_trip import WORK_S
from benchmarks.suite import MAX_STARTS
from benchmarks.team import TeamFailed, run_team

PROCESSES = (2, 4, 8, 16)
SIMULATED = (2, 4, 8, 16, 32, 64, 128, 256)
NUM_VALUES = 8320
NUM_MORE_VALUES = 65_536
TIMEOUT_S = 600
HOME_UPLINK = 10e6 / 8
"""Bytes per second of the link that a peer at home has."""

PROCESS_COLUMNS = {
    "s beyond the work": ("seconds", 1, "{:.3f}"),
    "CPU s per peer and epoch": ("cpu_seconds", 1, "{:.3f}"),
    "kB sent per peer and epoch": ("bytes_sent", 1e-3, "{:.0f}"),
}
SIMULATED_COLUMNS = {
    "news: kB/s per peer": ("news_bytes_per_s", 1e-3, "{:.1f}"),
    "of the one all ask": ("most_news_bytes_per_s", 1e-3, "{:.0f}"),
    "CPU % per peer": ("news_cpu", 100, "{:.1f}"),
    "round: control kB per peer": ("control_bytes", 1e-3, "{:.1f}"),
    "of the leader": ("most_control_bytes", 1e-3, "{:.0f}"),
    "values kB per peer": ("value_bytes", 1e-3, "{:.0f}"),
    "of who sends most": ("most_value_bytes", 1e-3, "{:.0f}"),
    "streams of who has most": ("most_streams", 1, "{:.0f}"),
    "CPU ms per peer": ("seconds", 1e3, "{:.1f}"),
}


def measure_processes(size: int) -> Entry:
    from tests.lab import Lab

    with Lab() as lab:
        host = lab.host("all")
        reports = run_team("benchmarks.arms.round_collab", [], size, TIMEOUT_S, [host.prefix] * size)
    return {
        "seconds": statistics.mean(report["seconds_per_epoch"] for report in reports) - WORK_S,
        "cpu_seconds": statistics.mean(report["cpu_seconds"] for report in reports),
        "bytes_sent": statistics.mean(report["bytes_of_all"] for report in reports) / size,
    }


def measure_simulated(size: int, num_values: int) -> Entry:
    from benchmarks.simulated import simulate

    return simulate(size, num_values)


class GrowthSuite:
    """Like the other suites, but the size is what it is about."""

    has_times = True

    def run(self, record: Record, num_repeats: int) -> None:
        for repeat in range(num_repeats):
            for size in PROCESSES:
                self._once(record, repeat, size, "processes", 0)
            for num_values in (NUM_VALUES, NUM_MORE_VALUES):
                for size in SIMULATED:
                    self._once(record, repeat, size, "simulated", num_values)

    def _once(self, record: Record, repeat: int, size: int, arm: str, num_values: int) -> None:
        key = {"arm": arm, "size": size, "repeat": repeat, "num_values": num_values or NUM_VALUES}
        if record.entries_of(**key):
            return
        for num_failed in range(MAX_STARTS):
            try:
                entry = measure_simulated(size, num_values) if num_values else measure_processes(size)
            except TeamFailed as error:
                print(f"{arm} {size}: {error}", flush=True)
                continue
            record.add({**key, **entry, "failed_starts": num_failed})
            print(f"{repeat + 1} {arm} {size} peers: {entry['seconds']:.3f} s", flush=True)
            return
        raise SystemExit(f"{arm} with {size} peers failed {MAX_STARTS} times in a row; its own words are above.")

    def table(self, record: Record) -> str:
        tables = [_table(record, PROCESS_COLUMNS, arm="processes")]
        for num_values in (NUM_VALUES, NUM_MORE_VALUES):
            table = _table(record, SIMULATED_COLUMNS, arm="simulated", num_values=num_values)
            tables.append(f"Simulated, {num_values} values:\n\n{table}")
        return "\n\n".join(tables)

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.plotting import curves

        def line(key: str, factor: float, **which: object) -> dict[int, float]:
            sizes = sorted({entry["size"] for entry in record.entries_of(**which)})
            return {size: factor * _median(record, key, size=size, **which) for size in sizes}

        simulated = {"arm": "simulated", "num_values": NUM_VALUES}
        curves(
            {
                "kB per peer and epoch of 2 s": {
                    "processes, everything": line("bytes_sent", 1e-3, arm="processes"),
                    "simulated: news": line("news_bytes_per_s", 1e-3 * WORK_S, **simulated),
                    "simulated: matchmaking": line("control_bytes", 1e-3, **simulated),
                    "simulated: values": line("value_bytes", 1e-3, **simulated),
                },
                "kB/s of the peer that all ask for news": {
                    "simulated": line("most_news_bytes_per_s", 1e-3, **simulated),
                    "a home link of 10 Mbit/s": dict.fromkeys(SIMULATED, HOME_UPLINK * 1e-3),
                },
                "ms per peer and epoch": {
                    "processes: beyond the work": line("seconds", 1e3, arm="processes"),
                    "processes: CPU": line("cpu_seconds", 1e3, arm="processes"),
                    "simulated: CPU of a round": line("seconds", 1e3, **simulated),
                    "simulated: CPU of news": line("news_cpu", 1e3 * WORK_S, **simulated),
                },
            },
            x="peers",
            path=path,
        )


def _median(record: Record, key: str, **which: object) -> float:
    values: list[float] = [entry[key] for entry in record.entries_of(**which)]
    return statistics.median(values)


def _table(record: Record, columns: dict[str, tuple[str, float, str]], **which: object) -> str:
    rows = [["peers", *columns, "starts"], ["---"] * (len(columns) + 2)]
    for size in sorted({entry["size"] for entry in record.entries_of(**which)}):
        cells = [
            form.format(factor * _median(record, key, size=size, **which)) for key, factor, form in columns.values()
        ]
        rows.append([str(size), *cells, str(len(record.entries_of(size=size, **which)))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


SUITE = GrowthSuite()
