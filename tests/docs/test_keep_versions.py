"""The page on keeping versions can be followed from top to bottom: its files written, its commands typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import DOCS, Command, File, steps
from terminals import Terminals

PAGE = DOCS / "how-to" / "keep-versions.md"
ELSEWHERE = ("owner/name", "collab1_")  # a repository on the Hub, a run: tests/hub and tests/swarm have those


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    assert terminals.close() == []


@pytest.mark.timeout(300)
def test_the_page_on_keeping_versions_works_as_written(terminals: Terminals) -> None:
    said = {}
    for step in steps(PAGE):
        match step:
            case File(name, text):
                (terminals.folder / name).write_text(text)
            case Command(text=text) if not any(word in text for word in ELSEWHERE):
                said[text.split(" --state-dir")[0]] = terminals.finish(terminals.start(text))
    assert "make_models.py" in said["collab models show car-17"]
    assert "the same model came out (R2)" in said["collab models verify --replay car-18"]
    assert "1 of 2 tensors changed" in said["collab models diff base car-17"]
    assert (terminals.folder / "recovered" / "model.safetensors").exists()
    log = terminals.finish(terminals.start("collab models log --json --state-dir ./archive"))
    levels = {row["ref"]: row["level"] for row in json.loads(log)["versions"]}
    assert levels == {"car-18": "R2", "car-17": "R1", "base": "R1"}
