"""Bytes to keep 20 epochs of a model, and seconds to save one and to get one back; bit for bit, or it does not count.

Whoever trains must not wait for it: an auxiliary that keeps every epoch is compared with one that keeps none.

Cases: every epoch of a real training of a 10.7 M GPT in float32; the same weights in bfloat16; and a model of the size
of a ResNet-18 of which only the classifier is trained. Ours recovers from 50 epochs. A plain load
is `torch.load` of the same weights.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.archives.arms import ARMS, Arm, Collab
from benchmarks.archives.models import NUM_EPOCHS, epochs_of, relative_update
from benchmarks.record import Entry, Record
from benchmarks.team import run_team

CASES = ("fp32", "bf16", "head")
NUM_KEPT = 20
SAVING = {"keeps no epoch": 0, "keeps every epoch": 1}
SAVING_TIMEOUT_S = 300
DATA = Path("build/benchmarks/archive-data")


class ArchiveSuite:
    """Like the other suites, but what counts most is bytes."""

    title = f"Keeping {NUM_KEPT} epochs: bytes, in % of the raw weights"
    has_times = True

    def run(self, record: Record, num_repeats: int) -> None:
        """Every arm in turn, again and again: what the machine does meanwhile hits all of them."""
        torch.set_num_threads(2)
        arms = {arm: kind for arm, kind in ARMS.items() if not arm.startswith("ZipNN") or _has_zipnn()}
        if len(arms) < len(ARMS):
            print("zipnn is not installed (pip install zipnn==0.5.4), its arms are left out")
        for repeat in range(num_repeats):
            for case in CASES:
                paths = epochs_of(case, DATA)
                update = relative_update(paths[:NUM_KEPT])
                for arm, kind in arms.items():
                    if record.entries_of(arm=arm, case=case, repeat=repeat):
                        continue
                    entry = _measure(kind, paths)
                    record.add({"arm": arm, "case": case, "repeat": repeat, "relative_update": update, **entry})
                    print(f"{case} {arm:<19} {100 * entry['bytes'] / entry['raw_bytes']:.1f} % of raw")
            for arm, every in SAVING.items():
                if not record.entries_of(arm=arm, repeat=repeat):
                    entry = _measure_saving(every)
                    record.add({"arm": arm, "case": "saving", "repeat": repeat, **entry})
                    print(f"an auxiliary that {arm}: {entry}")

    def table(self, record: Record) -> str:
        headings = [
            "case",
            "relative update",
            "arm",
            "% of raw",
            "save, s",
            "newest, s",
            "any (p95), s",
            "newest × plain",
        ]
        rows = [headings, ["---"] * len(headings)]
        for case in CASES:
            for arm in ARMS:
                entries = record.entries_of(arm=arm, case=case)
                if not entries:
                    continue
                middle = {key: statistics.median(entry[key] for entry in entries) for key in MEASURED}
                rows.append(
                    [
                        case,
                        f"{entries[0]['relative_update']:.1e}",
                        arm,
                        f"{100 * entries[0]['bytes'] / entries[0]['raw_bytes']:.1f}",
                        f"{middle['save_s']:.3f}",
                        f"{middle['newest_s']:.3f}",
                        f"{middle['any_s']:.3f}",
                        f"{middle['newest_s'] / middle['plain_s']:.2f}",
                    ]
                )
        tables = (_markdown(rows), self._further_table(record), self._saving_table(record), self._costs_table(record))
        return "\n\n".join(tables)

    def _further_table(self, record: Record) -> str:
        """As MMlib counts: what one more version takes beside the first whole one."""
        rows = [["arm", *CASES], ["---"] * (1 + len(CASES))]
        for arm in ARMS:
            shares = []
            for case in CASES:
                entries = record.entries_of(arm=arm, case=case)
                shares.append(f"{100 * statistics.median(map(_further, entries)):.1f} %" if entries else "–")
            rows.append([arm, *shares])
        return _markdown(rows)

    def _saving_table(self, record: Record) -> str:
        headings = ["the auxiliary", "trainer: ms per step", "trainer: s per epoch", "auxiliary: s until it is ready"]
        rows = [headings, ["---"] * len(headings)]
        for arm in SAVING:
            if entries := record.entries_of(arm=arm):
                middle = {key: statistics.median(entry[key] for entry in entries) for key in WAITING}
                step, epoch, busy = (middle[key] for key in WAITING)
                rows.append([arm, f"{1000 * step:.1f}", f"{epoch:.2f}", f"{busy:.2f}"])
        return _markdown(rows)

    def _costs_table(self, record: Record) -> str:
        """What `collab models cost` said of the oldest version, beside what it then was."""
        headings = ["case", "bytes, predicted / measured", "seconds to recover, predicted / measured"]
        rows = [headings, ["---"] * len(headings)]
        for case in CASES:
            if entries := record.entries_of(arm="collab", case=case):
                middle = {key: statistics.median(entry[key] for entry in entries) for key in COSTS}
                sizes = middle["predicted_bytes"] / middle["measured_bytes"]
                seconds = middle["predicted_s"] / middle["measured_s"]
                rows.append([case, f"{sizes:.2f}", f"{seconds:.2f}"])
        return _markdown(rows)

    def plot(self, record: Record, path: Path) -> None:
        from benchmarks.plotting import bars

        def shares(case: str, arm: str) -> list[float]:
            entries = record.entries_of(arm=arm, case=case)
            return [100 * entry["bytes"] / entry["raw_bytes"] for entry in entries]

        arms = [arm for arm in ARMS if record.entries_of(arm=arm)]
        groups = {case: {arm: shares(case, arm) for arm in arms} for case in CASES}
        bars(groups, title=self.title, unit="% of raw, lower is better", path=path)


COSTS = ("predicted_bytes", "measured_bytes", "predicted_s", "measured_s")
WAITING = ("step_s", "epoch_s", "busy_s")
MEASURED = ("save_s", "newest_s", "any_s", "plain_s")


def _further(entry: Entry) -> float:
    """What one more version took, in parts of a whole one, on average."""
    whole = entry["raw_bytes"] / NUM_KEPT
    return float((entry["bytes"] - entry["first_bytes"]) / (NUM_KEPT - 1) / whole)


def _measure_saving(every: int) -> Entry:
    auxiliary, trainer = run_team("benchmarks.arms.saving", [str(every)], 2, SAVING_TIMEOUT_S)
    return {**auxiliary, **trainer}


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _measure(kind: type[Arm], paths: list[Path]) -> Entry:
    with tempfile.TemporaryDirectory(prefix="collab-archive-") as name:
        folder = Path(name) / "versions"
        folder.mkdir()
        arm = kind(folder)
        save_s = []
        size = first_bytes = 0
        for number, path in enumerate(paths if issubclass(kind, Collab) else paths[:NUM_KEPT]):
            weights = load_file(path)
            start = time.perf_counter()
            arm.save(number, weights)
            save_s.append(time.perf_counter() - start)
            if number in (0, NUM_KEPT - 1):
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                first_bytes = first_bytes or size
        last = len(save_s) - 1
        plain = Path(name) / "plain.pt"
        torch.save(load_file(paths[last]), plain)
        pairs = [(_seconds(arm, last, paths), _plain(plain)) for _ in range(5)]  # in turn: the machine has moods
        newest_s, plain_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        any_s = sorted(_seconds(arm, number, paths) for number in range(0, last + 1, 2))
        costs = arm.costs(0, Path(name)) if isinstance(arm, Collab) else {}
        return {
            **costs,
            "bytes": size,
            "first_bytes": first_bytes,
            "raw_bytes": sum(t.nbytes for path in paths[:NUM_KEPT] for t in load_file(path).values()),
            "save_s": statistics.median(save_s),
            "newest_s": newest_s,
            "any_s": any_s[int(0.95 * (len(any_s) - 1))],
            "plain_s": plain_s,
            "num_versions": last + 1,
        }


def _forget_memory() -> None:
    """Give freed memory back, so that whoever loads next does not find what the last one left: that halves the time."""
    ctypes.CDLL(None).malloc_trim(0)


def _seconds(arm: Arm, number: int, paths: list[Path]) -> float:
    _forget_memory()
    start = time.perf_counter()
    weights = arm.load(number)
    taken = time.perf_counter() - start
    expected = load_file(paths[number])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    return taken


def _plain(path: Path) -> float:
    _forget_memory()
    start = time.perf_counter()
    weights = torch.load(path, weights_only=True)
    taken = time.perf_counter() - start
    assert weights
    return taken


def _has_zipnn() -> bool:
    try:
        import zipnn  # noqa: F401
    except ImportError:
        return False
    return True


assert NUM_EPOCHS >= NUM_KEPT
SUITE = ArchiveSuite()
