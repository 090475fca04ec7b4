"""What people read about quarantine, on the terminal and in `collab status`."""

from __future__ import annotations

import io

from rich.console import Console

from collab_cli.lines import describe
from collab_cli.status import peer_table

SENTENCE = {"until_epoch": 12, "reason": "part 0 [has] values that are not finite", "said_by": "aux"}


def plain(text: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(text)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_terminal_names_who_is_kept_out_only_if_it_is_believed() -> None:
    event = {"event": "quarantined", "name": "mallory", "peer_id": "x", "is_believed": True, **SENTENCE}
    line = plain(describe(event))
    assert "mallory is kept out until epoch 12, says aux: part 0 [has] values that are not finite" in line
    assert describe({**event, "is_believed": False}) is None


def test_a_machine_that_is_kept_out_says_until_when_and_why() -> None:
    line = plain(describe({"event": "kept_out", "epoch": 2, **SENTENCE}))
    assert "until epoch 12, says aux: part 0 [has] values that are not finite" in line


def test_status_shows_who_is_kept_out_instead_of_what_it_does() -> None:
    peer = {
        "name": "mallory",
        "role": "trainer",
        "mode": "direct",
        "phase": "working",
        "epoch": 3,
        "samples": 8,
        "samples_per_second": 1.0,
        "loss": None,
        "model_root": None,
        "distance": None,
        "last_seen": 0.0,
        "quarantined": None,
    }
    assert "working" in plain(peer_table([peer]))
    table = plain(peer_table([{**peer, "quarantined": {"until_epoch": 12, "reason": "lied"}}]))
    assert "quarantined" in table
    assert "working" not in table
