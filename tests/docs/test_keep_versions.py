"""The page on keeping versions can be followed from top to bottom: its files written, its commands typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_endpoint import TOKEN, USER, serve_hub
from pages import DOCS, Command, File, steps
from terminals import Terminals

PAGE = DOCS / "how-to" / "keep-versions.md"
REPO = f"{USER}/name"
NUM_EPOCHS = 12  # the page asks for that one
ONLY_HERE = "--host-maddrs /ip4/127.0.0.1/tcp/0"  # no test listens where others can connect


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    """The real client of the Hub, and a small Hub on this machine."""
    with serve_hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        terminals = Terminals(tmp_path, HF_HOME=str(tmp_path / "hub"), **environment)
        yield terminals
        assert terminals.close() == []


@pytest.mark.timeout(300)
def test_the_page_on_keeping_versions_works_as_written(terminals: Terminals) -> None:
    said, invite = {}, ""
    for step in steps(PAGE):
        match step:
            case File(name, text):
                (terminals.folder / name).write_text(text)
            case Command(text=text):
                if "collab1_…" in text:
                    invite = invite or begin_a_run(terminals)
                typed = text.replace("collab1_…", invite).replace("owner/name", REPO)
                said[text.split(" --state-dir")[0]] = terminals.finish(terminals.start(typed))
    assert "make_models.py" in said["collab models show car-17"]
    assert "the same model came out (R2)" in said["collab models verify --replay car-18"]
    assert "1 of 2 tensors changed" in said["collab models diff base car-17"]
    assert (terminals.folder / "recovered" / "model.safetensors").exists()
    assert levels(terminals, "archive") == {"car-18": "R2", "car-17": "R1", "base": "R1"}
    pulled = levels(terminals, "elsewhere")
    assert {"car-17", f"epoch:{NUM_EPOCHS}"} <= pulled.keys(), pulled


def begin_a_run(terminals: Terminals) -> str:
    """Somebody's run, whose auxiliary takes models from everyone; returns its invite."""
    terminals.finish(terminals.start("collab new my-run"))
    terminals.start(f"collab aux my-run --accept-models anyone --invite-file invite.txt {ONLY_HERE}")
    file = terminals.folder / "invite.txt"
    terminals.wait_for(file.exists, "the invite")
    invite = file.read_text().strip()
    terminals.start(f"collab train {invite} --batch-size 64 {ONLY_HERE}")

    def is_kept() -> bool:
        return any(event["event"] == "epoch" and event["epoch"] > NUM_EPOCHS for event in terminals.events())

    terminals.wait_for(is_kept, f"epoch {NUM_EPOCHS}")
    return invite


def levels(terminals: Terminals, archive: str) -> dict[str, str]:
    """How sure it is that each version can be had back, by its name."""
    log = terminals.finish(terminals.start(f"collab models log --json --state-dir ./{archive}"))
    return {row["ref"]: row["level"] for row in json.loads(log)["versions"]}
