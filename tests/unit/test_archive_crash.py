"""A writer that is killed at any moment, and a disk that is full: nothing that was saved is lost."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_writer import weights, write

from collab_core.archive import Archive, Keep, Provenance, verify
from collab_core.errors import ArchiveError, Code

NUM_KILLS = 50
WRITERS = multiprocessing.get_context("forkserver")  # they are loaded once, and each is a process of its own
WRITERS.set_forkserver_preload(["archive_writer"])


def test_a_writer_killed_at_random_moments_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "archive"
    saved = -1
    for _ in range(NUM_KILLS):
        told = killed_while_writing(folder, rng.uniform(0, 0.06))
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


def killed_while_writing(folder: Path, after_s: float) -> list[int]:
    """Start a writer, and kill it so long after its first version; returns what it said to have saved."""
    heard, told = WRITERS.Pipe(duplex=False)
    writer = WRITERS.Process(target=write, args=(folder, told))
    writer.start()
    told.close()
    saved = [heard.recv()]  # it is under way: now at any moment
    time.sleep(after_s)
    writer.kill()
    with contextlib.suppress(EOFError, OSError):  # all that came before the end
        while True:
            saved.append(heard.recv())
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    return saved


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
