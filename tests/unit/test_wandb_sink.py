"""wandb gets the curves if it works, and the run goes on if it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import wait_until
from test_checkpoints import Organiser

from collab_core.telemetry import EventLog
from collab_core.telemetry.wandb_sink import WandbSink


class Told:
    """A log, and what is said in it about wandb."""

    def __init__(self, folder: Path) -> None:
        self.events = EventLog(folder / "events.jsonl")
        self.reasons: list[str] = []
        self.events.listen(lambda event: self.reasons.append(event["reason"]) if "reason" in event else None)

    def write_an_epoch(self) -> None:
        facts = {"loss": 2.5, "samples": 256, "samples_per_second": 10.0, "trainers": 2, "peers": 3}
        self.events.write("swarm", epoch=1, **facts)
        self.events.write("sampled", epoch=1, text="once <b>upon</b> a time", seconds=0.1)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Told(tmp_path)
    yield made
    made.events.close()


def sink(told: Told, folder: Path, project: str = "stories") -> WandbSink:
    return WandbSink(project, Organiser(folder).manifest, folder, told.events)


def test_the_curves_are_kept_offline(told: Told, tmp_path: Path) -> None:
    with sink(told, tmp_path) as sending:
        told.write_an_epoch()
        wait_until(lambda: bool(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))), "wandb's file", 60)
        sending._put(None)
        sending._thread.join(30)
        assert not sending._thread.is_alive()
    assert told.reasons == []
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # wandb's own process writes it, a moment after it said that the run is finished
    wait_until(lambda: b"samples_per_second" in kept.read_bytes(), "the curves")


def test_a_missing_package_is_words(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with sink(told, tmp_path):
        told.write_an_epoch()
        wait_until(lambda: bool(told.reasons), "the reason")
        told.write_an_epoch()
    assert told.reasons == ["the package is missing; install it with: pip install wandb"]


def test_what_wandb_does_not_like_is_words(told: Told, tmp_path: Path) -> None:
    with sink(told, tmp_path, project="not/a:project"):
        wait_until(lambda: bool(told.reasons), "the reason", 60)
    assert "project" in told.reasons[0]
    assert "Traceback" not in told.reasons[0]
