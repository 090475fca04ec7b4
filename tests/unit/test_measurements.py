"""What a benchmark measured is taken up where it means the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import record
from benchmarks.record import Record
from benchmarks.suite import MAX_STARTS, Suite
from benchmarks.team import TeamFailed


@pytest.mark.parametrize(("has_times", "is_taken_up"), [(True, False), (False, True)])
def test_another_machine_goes_on_only_with_what_has_no_times(
    has_times: bool, is_taken_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "suite.json"
    Record.open(path, is_fresh=False, has_times=has_times).add({"arm": "a"})
    assert Record.open(path, is_fresh=False, has_times=has_times).entries == [{"arm": "a"}]
    assert Record.open(path, is_fresh=True, has_times=has_times).entries == []

    monkeypatch.setattr(record, "_machine", lambda: "another")
    elsewhere = Record.open(path, is_fresh=False, has_times=has_times)
    assert elsewhere.entries == ([{"arm": "a"}] if is_taken_up else [])
    if is_taken_up:
        elsewhere.add({"arm": "b"})
        assert "another" in Record.open(path, is_fresh=False, has_times=False).machine
        assert len(Record.open(path, is_fresh=False, has_times=False).entries) == 2


@pytest.mark.parametrize("has_times", [True, False])
def test_other_versions_begin_anew(has_times: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "suite.json"
    Record.open(path, is_fresh=False, has_times=has_times).add({"arm": "a"})
    monkeypatch.setattr(record, "version", lambda name: "99")
    assert Record.open(path, is_fresh=False, has_times=has_times).entries == []


def test_who_fails_again_and_again_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    starts = []

    def measure(arm: str, size: int) -> record.Entry:
        starts.append((arm, size))
        if (arm, size) == ("rival", 4) or starts.count(("ours", 2)) == 1:
            raise TeamFailed("it fell over")
        return {"seconds": float(size)}

    suite = Suite(
        title="A race",
        sizes=(2, 4),
        unit_of_size="peers",
        arms=("rival", "ours"),
        measure=measure,
        compared_with=("rival",),
        columns={"runs": lambda entries: str(len(entries))},
    )
    kept = Record.open(tmp_path / "race.json", is_fresh=False)
    suite.run(kept, 2)
    assert starts.count(("rival", 4)) == MAX_STARTS, "once is enough"
    assert suite.table(kept).splitlines()[2:] == [
        "| 2 | rival | 2.000 | 2.000 – 2.000 | 1.00 | 2 | 0 of 2 |",
        "| 2 | ours | 2.000 | 2.000 – 2.000 | 1.00 | 2 | 1 of 3 |",
        "| 4 | rival | – | – | – | – | 3 of 3 |",
        "| 4 | ours | 4.000 | 4.000 – 4.000 | – | 2 | 0 of 2 |",
    ]
