"""Every test cleans up its processes, and fails if any is left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PeerProcess, wait_until

GONE_WITHIN_S = 5.0
ONE_AT_A_TIME = (
    "swarm",
    "lab",
)  # these tests keep a core busy with several processes; the rest runs beside them


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ONE_AT_A_TIME:
            item.add_marker(pytest.mark.xdist_group("swarm"))


class SwarmOfProcesses:
    """Peers of one test: an auxiliary that hands out the invite, trainers that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[PeerProcess] = []

    def start(self, name: str, *command: str, **options: Any) -> PeerProcess:
        peer = PeerProcess(self.folder / "peers" / name, *command, **options)
        self.peers.append(peer)
        return peer

    def aux(self, run: Path | str, name: str = "aux", *options: str, **more: Any) -> PeerProcess:
        invite_file = self.folder / "peers" / name / "invite"
        peer = self.start(name, "aux", str(run), "--invite-file", str(invite_file), *options, **more)
        wait_until(lambda: invite_file.exists() or peer.process.poll() is not None, "an invite", 60)
        assert peer.process.poll() is None, peer.tail()
        return peer

    def invite(self, name: str = "aux") -> str:
        return (self.folder / "peers" / name / "invite").read_text().strip()

    def trainer(self, name: str, *options: str, **more: Any) -> PeerProcess:
        batch = () if "--batch-size" in options else ("--batch-size", "8")
        return self.start(name, "train", self.invite(), *batch, *options, **more)

    def close(self) -> None:
        for peer in self.peers:
            peer.descendants()
            peer.close()
        for peer in self.peers:
            wait_until(lambda peer=peer: not peer.left_behind(), f"{peer.left_behind()} to end", GONE_WITHIN_S)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SwarmOfProcesses]:
    shared_before = set(Path("/dev/shm").iterdir())
    made = SwarmOfProcesses(tmp_path)
    yield made
    made.close()
    left = {path for path in Path("/dev/shm").iterdir() if not _belongs_to_the_living(path)}
    assert left <= shared_before, "a shared-memory file is left"


def _belongs_to_the_living(path: Path) -> bool:
    """Whether a process that still runs, so none of ours, made this file (`torch_<pid>_…`)."""
    pid = path.name.removeprefix("torch_").partition("_")[0]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="collab-test-") as folder:
        yield Path(folder)


@pytest.fixture
def closing() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Things to close at the end, last first."""
    actions: list[Callable[[], None]] = []
    yield actions.append
    for action in reversed(actions):
        action()
