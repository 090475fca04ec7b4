"""Backups of a gossip run: a slow disk costs backups, and not memory."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collab_core.gossip import Kept, keeping
from collab_core.state.layout import Layout


def test_on_a_slow_disk_only_the_newest_backup_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    layout = Layout.of(model)
    session: Any = SimpleNamespace(
        folder=SimpleNamespace(backup=tmp_path / "backup"), manifest=SimpleNamespace(run_id="run"), events=None
    )
    written: list[int] = []
    may_write, has_begun = threading.Event(), threading.Event()

    def write(path: Path, run_id: str, snapshot: Any, history: Any, notes: Any) -> None:
        has_begun.set()
        assert may_write.wait(30)
        written.append(snapshot.epoch)

    monkeypatch.setattr(keeping, "write_backup", write)
    keeper = keeping.Keeping(session, layout, {})
    for epoch in range(10):
        keeper.back_up(Kept(values=layout.read(model), epoch=epoch, exchanges=[], samples=0))
        if epoch == 0:
            assert has_begun.wait(30)
    may_write.set()
    keeper.close()
    assert written == [0, 9]
