"""Following the tutorial on custom tasks, and nothing else, gives a task that two trainers train together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installing import make_environment
from pages import DOCS, Command, File, steps
from terminals import Terminals

PAGE = DOCS / "tutorials" / "custom-task.md"
EPOCHS_TOGETHER = 10


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path, **make_environment(tmp_path / "environment"))
    yield terminals
    assert terminals.close() == []


@pytest.mark.timeout(600)
def test_a_task_written_by_the_tutorial_is_trained_by_two_peers(terminals: Terminals) -> None:
    running = []
    for step in steps(PAGE):
        match step:
            case File(name, text):
                path = terminals.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            case Command(text=text) if text.startswith(("collab aux", "collab train")):
                running.append(terminals.start(text))
                if len(running) == 1:
                    terminals.wait_for((terminals.folder / "invite.txt").exists, "the invite")
            case Command(text=text):
                said = terminals.finish(terminals.start(text))
                assert "Loss on data" in said or "demo" not in text

    auxiliary, *trainers = running
    assert len(trainers) == 2
    terminals.wait_for(lambda: len(roots_of_two(terminals)) > EPOCHS_TOGETHER, "epochs of two trainers")
    for trainer in trainers:
        trainer.send_signal(signal.SIGINT)
    assert all("Left at epoch" in terminals.finish(trainer) for trainer in trainers)
    auxiliary.send_signal(signal.SIGINT)
    assert "Left at epoch" in terminals.finish(auxiliary)

    assert all(len(roots) == 1 for roots in roots_of_two(terminals).values())
    losses = {event["epoch"]: event["loss"] for event in epochs(terminals) if event["loss"] is not None}
    assert losses[max(losses)] < 0.6 * losses[min(losses)]


def epochs(terminals: Terminals) -> list[dict[str, Any]]:
    return [event for event in terminals.events() if event["event"] == "epoch"]


def roots_of_two(terminals: Terminals) -> dict[int, set[str]]:
    """Epochs to which both trainers contributed, with the roots that anybody had afterwards."""
    together = {event["epoch"] for event in epochs(terminals) if len(event["members"]) == 2}
    return {epoch: {event["root"] for event in epochs(terminals) if event["epoch"] == epoch} for epoch in together}
