"""A writer that is killed at any moment, and a disk that is full: nothing that was saved is lost."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_writer import weights

from collab_core.archive import Archive, Keep, Provenance, verify
from collab_core.errors import ArchiveError, Code

NUM_KILLS = 50
WRITER = Path(__file__).parent / "archive_writer.py"


def test_a_writer_killed_at_random_moments_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "archive"
    saved = -1
    for _ in range(NUM_KILLS):
        with subprocess.Popen([sys.executable, str(WRITER), str(folder)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()  # it is under way: now at any moment
            time.sleep(rng.uniform(0, 0.15))
            writer.kill()
            told = [int(line) for line in (first, *writer.stdout.read().split()) if line.strip().isdigit()]
        saved = max(saved, *told)
        archive = Archive(folder)
        assert verify(archive) == (len(archive.versions()), [])
        assert [version.epoch for version in archive.versions()][: saved + 1] == list(range(saved + 1))
        archive.close()
    archive = Archive(folder)
    archive.settle()
    for version in archive.versions():
        wanted = weights(version.epoch or 0)
        assert all(bytes(archive.store.read(entry)) == wanted[entry.name].data for entry in version.entries())
    settled = sum(path.stat().st_size for path in folder.rglob("*"))
    whole = Archive(tmp_path / "undisturbed")
    for epoch in range(len(archive.versions())):
        whole.save(weights(epoch), Provenance(run_id="run", epoch=epoch))
    undisturbed = sum(path.stat().st_size for path in whole.folder.rglob("*"))
    assert settled < 1.1 * undisturbed, "what was left behind grows"
    assert not list(folder.rglob(".*"))
    archive.close()
    whole.close()


def test_a_full_disk_costs_the_new_version_and_nothing_else(small_disk: Path) -> None:
    archive = Archive(small_disk / "archive")
    epochs = itertools.count()
    with pytest.raises(ArchiveError) as caught:
        fill(archive, epochs)
    epoch = next(epochs)
    assert caught.value.code is Code.ARCHIVE_UNWRITABLE
    assert epoch > 3
    assert verify(archive)[1] == []
    archive.collect_garbage(Keep(last=2, every=(10**6,)))
    archive.save(weights(epoch), Provenance(run_id="run", epoch=epoch))
    assert verify(archive)[1] == []
    archive.close()


def fill(archive: Archive, epochs: Iterator[int]) -> None:
    for epoch in epochs:
        archive.save(weights(epoch), Provenance(run_id="run", epoch=epoch))


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
