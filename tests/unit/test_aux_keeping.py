"""What an auxiliary keeps and uploads, off the run's way: disks and Hubs that say no cost versions, never the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hub_endpoint import TOKEN, Hub, Refusal
from processes import wait_until
from test_checkpoints import Organiser

from collab_aux import checkpointer as checkpointing
from collab_aux import sampler
from collab_aux.archivist import Archivist
from collab_aux.checkpointer import Checkpointer
from collab_core.archive import Archive, Keep, verify
from collab_core.session import Session
from collab_core.state.folder import StateFolder
from collab_core.state.snapshot import Snapshot
from collab_core.telemetry import EventLog

REPO = "ada/checkpoints"
FULL = "Private repository storage limit reached, please upgrade your plan"
SETTINGS = f'[checkpoints]\nremote = "{REPO}"\nupload_every = 1\nkeep = 1000\n'


class Auxiliary:
    """As much of a session as a keeper needs: a signed run, a folder, an event log; no swarm."""

    def __init__(self, folder: Path, state_dir: Path) -> None:
        self.organiser = Organiser(folder, SETTINGS)
        self.log: list[dict[str, Any]] = []
        self.published: list[Any] = []
        self._folder, self._events = StateFolder(state_dir), EventLog(folder / "events.jsonl")
        self._events.listen(self.log.append)
        swarm = SimpleNamespace(
            identity=self.organiser.identity,
            grant=self.organiser.grant,
            publish=lambda *, checkpoint: self.published.append(checkpoint),
        )
        parts = {"manifest": self.organiser.manifest, "folder": self._folder, "events": self._events, "swarm": swarm}
        self.session = cast(Session, SimpleNamespace(**parts))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.log if event["event"] == kind]

    def close(self) -> None:
        self._events.close()
        self._folder.close()


def state(epoch: int, size: int = 1000) -> Snapshot:
    generator = torch.Generator().manual_seed(epoch)
    return Snapshot(
        epoch,
        {
            "model/w": torch.randn(size, generator=generator),
            "run/epoch": torch.tensor(epoch),
            "run/parent_root": torch.zeros(32, dtype=torch.uint8),
        },
    )


@pytest.fixture
def aux(tmp_path: Path) -> Iterator[Auxiliary]:
    made = Auxiliary(tmp_path, tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def uploader(aux: Auxiliary, hub: Hub, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """Uploads to the small Hub, in this process, and does not wait long before it tries again."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(checkpointing, "PAUSES_S", (0.01, 0.01))
    made = Checkpointer(aux.session, {}, lambda: True)
    yield made
    made.close()


def offer(uploader: Checkpointer, aux: Auxiliary, epoch: int) -> None:
    snapshot = state(epoch)
    uploader.offer(snapshot, aux.organiser.statement(epoch=epoch, root=snapshot.root))


def test_an_upload_that_fails_is_tried_again(aux: Auxiliary, hub: Hub, uploader: Checkpointer) -> None:
    answers = iter([Refusal(500, "", "out of order"), Refusal(502, "", "still out of order")])

    def fail_twice() -> None:
        if (refusal := next(answers, None)) is not None:
            raise refusal

    hub.before_commit = fail_twice
    offer(uploader, aux, 2)
    wait_until(lambda: bool(aux.published), "the upload")
    assert [event["epoch"] for event in aux.events("checkpoint_failed")] == [2, 2]
    assert "out of order" in aux.events("checkpoint_failed")[0]["reason"]
    assert aux.published[0].revision == list(hub.repos["models", REPO].commits)[-1]


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (403, FULL, "quota"),
        (402, "Payment required", "quota"),
        (413, "Payload too large", "quota"),
        (507, "Insufficient storage", "quota"),
        (403, "You don't have the rights to push to this repo", "no right"),
    ],
)
def test_what_the_hub_says_is_told_and_the_next_epoch_is_tried(
    aux: Auxiliary, hub: Hub, uploader: Checkpointer, status: int, said: str, told: str
) -> None:
    def refuse() -> None:
        raise Refusal(status, "", said)

    hub.before_commit = refuse
    offer(uploader, aux, 2)
    wait_until(lambda: bool(aux.events("checkpoint_failed")), "the refusal")
    (failed,) = aux.events("checkpoint_failed")
    assert said in failed["reason"]
    assert told in failed["reason"]
    hub.before_commit = lambda: None
    offer(uploader, aux, 3)
    wait_until(lambda: bool(aux.published), "the next upload")
    assert [note.epoch for note in aux.published] == [3]


def test_a_disk_that_fills_up_costs_versions_and_is_used_again_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    aux = Auxiliary(tmp_path, small_disk)
    archivist = Archivist(aux.session, lambda: 1.5, {})
    epoch = 0

    def settled() -> bool:
        """Whether the last epoch that was offered is kept, or was said to have failed."""
        kept = (small_disk / "archive" / "versions" / f"{root}.json").exists()
        return kept or any(event["epoch"] == epoch for event in aux.events("archive_failed"))

    def keep_next() -> None:
        nonlocal epoch, root
        epoch += 1
        snapshot = state(epoch, size=100_000)
        root = snapshot.root
        archivist.offer(snapshot, {"samples": 8}, {}, 8)
        wait_until(settled, f"epoch {epoch}")

    root = ""
    while not aux.events("archive_failed"):
        assert epoch < 50
        keep_next()
    assert epoch > 3
    assert "No space left on device" in aux.events("archive_failed")[0]["reason"]
    reader = Archive(small_disk / "archive")
    kept = [version.epoch for version in reader.versions()]
    assert kept[: epoch - 1] == list(range(1, epoch))
    assert verify(reader)[1] == []
    reader.collect_garbage(Keep(last=1, every=(10**6,)))
    num_failures = len(aux.events("archive_failed"))
    keep_next()
    assert len(aux.events("archive_failed")) == num_failures
    assert reader.find(f"epoch:{epoch}").root == root
    assert verify(reader)[1] == []
    archivist.close()
    reader.close()
    aux.close()


def test_the_model_writes_now_and_then_and_not_more(aux: Auxiliary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MIN_PAUSE_S", 1000.0)
    sampling = sampler.Sampler(lambda tensors: f"{len(tensors)} tensors", aux.session.events)
    sampling.offer(state(1))
    wait_until(lambda: bool(aux.events("sampled")), "what the model writes")
    sampling.offer(state(2))
    sampling.close()
    assert [(event["epoch"], event["text"]) for event in aux.events("sampled")] == [(1, "3 tensors")]


def test_a_model_that_cannot_write_says_so_once(aux: Auxiliary) -> None:
    def fail(tensors: object) -> str:
        raise ValueError("no prompt")

    sampling = sampler.Sampler(fail, aux.session.events)
    sampling.offer(state(1))
    wait_until(lambda: bool(aux.events("sampling_failed")), "the reason")
    sampling.offer(state(2))
    sampling.close()
    assert [event["reason"] for event in aux.events("sampling_failed")] == ["ValueError: no prompt"]
