"""Every test cleans up its processes, and fails if any is left."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from hub_endpoint import TOKEN, Hub, serve_hub
from nursery import Forked
from playwright.sync_api import Browser, sync_playwright
from processes import SwarmOfProcesses

from collab_core.archive import Archive

hypothesis.settings.register_profile("collab", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("collab")
ONE_AT_A_TIME = ("swarm", "lab")  # each of these folders keeps a core busy with several processes


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ONE_AT_A_TIME:
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SwarmOfProcesses]:
    shared_before = set(Path("/dev/shm").iterdir())
    made = SwarmOfProcesses(tmp_path, Forked)
    yield made
    made.close()
    left = {path for path in Path("/dev/shm").iterdir() if not belongs_to_the_living(path)}
    assert left <= shared_before, "a shared-memory file is left"


def belongs_to_the_living(path: Path) -> bool:
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


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Debian's Chromium; without it (`make browser-tools`, as root) these tests are skipped, and say so.

    One per test: as long as Playwright runs, nothing else in this thread can run an event loop.
    """
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed; as root: make browser-tools")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    made = Archive(tmp_path / "archive")
    yield made
    made.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as made:
        yield made


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """For a process that should take the small Hub for the real one."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",  # the endpoint speaks LFS, which every Hub does
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Three megabytes of disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
