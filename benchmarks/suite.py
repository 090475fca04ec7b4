"""What all suites have in common: arms measured in turn, a table of ratios, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.record import Entry, Record
from benchmarks.team import TeamFailed

MAX_STARTS = 3

Column = Callable[[list[Entry]], str]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One question, asked of several arms at several sizes."""

    has_times: ClassVar[bool] = True

    title: str
    sizes: tuple[int, ...]
    unit_of_size: str
    """Processes, or peers."""
    arms: tuple[str, ...]
    measure: Callable[[str, int], Entry]
    """(arm, size) → "seconds", and whatever else the table wants."""
    compared_with: tuple[str, ...]
    """Arms that get a column of ratios."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Further columns: heading → what stands there, from all repetitions of one arm and size."""

    def run(self, record: Record, num_repeats: int) -> None:
        """Every arm in turn, again and again: what the machine does meanwhile hits all of them.

        Who failed several times in a row is not asked again at this size, and the others go on.
        """
        for repeat in range(num_repeats):
            for size in self.sizes:
                for arm in self.arms:
                    if record.entries_of(arm=arm, size=size, repeat=repeat) or record.has_given_up(arm, size):
                        continue
                    entry = self._measure(arm, size)
                    record.add({"arm": arm, "size": size, "repeat": repeat, **entry})
                    result = f"{entry['seconds']:.3f} s" if "seconds" in entry else "given up; its own words are above"
                    print(f"{repeat + 1}/{num_repeats} {arm:<9} {size} {self.unit_of_size}: {result}")

    def _measure(self, arm: str, size: int) -> Entry:
        """One measurement. A start that fails is made again, and counted."""
        for num_failed in range(MAX_STARTS):
            try:
                return {**self.measure(arm, size), "failed_starts": num_failed}
            except TeamFailed as error:
                print(f"{arm:<9} {size} {self.unit_of_size}: {error}")
        return {"failed_starts": MAX_STARTS}

    def table(self, record: Record) -> str:
        ratios = [f"× {arm}" for arm in self.compared_with]
        headings = [
            self.unit_of_size,
            "arm",
            "seconds (median)",
            "best – worst",
            *ratios,
            *self.columns,
            "failed starts",
        ]
        rows = [headings, ["---"] * len(headings)]
        for size in self.sizes:
            measured = {arm: record.seconds(arm, size) for arm in self.arms}
            medians = {arm: statistics.median(seconds) for arm, seconds in measured.items() if seconds}
            for arm, seconds in measured.items():
                entries = record.entries_of(arm=arm, size=size)
                good = [entry for entry in entries if "seconds" in entry]
                num_failed = sum(entry["failed_starts"] for entry in entries)
                rows.append(
                    [
                        f"{size}",
                        arm,
                        f"{medians[arm]:.3f}" if good else "–",
                        f"{min(seconds):.3f} – {max(seconds):.3f}" if good else "–",
                        *(
                            f"{medians[arm] / medians[other]:.2f}" if good and other in medians else "–"
                            for other in self.compared_with
                        ),
                        *(column(good) if good else "–" for column in self.columns.values()),
                        f"{num_failed} of {num_failed + len(good)}",
                    ]
                )
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.plotting import bars

        bars(
            {
                f"{size} {self.unit_of_size}": {arm: record.seconds(arm, size) for arm in self.arms}
                for size in self.sizes
            },
            title=self.title,
            unit="seconds, lower is better",
            path=path,
        )
