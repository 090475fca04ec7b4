"""What a benchmark measured is taken up where it means the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import record
from benchmarks.record import Record


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
