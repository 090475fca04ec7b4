"""Checks of `collab doctor` that need no network: packages, limits, disk, memory."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from collab_core.doctor import BOTH, Check, guarded, machine, possible_roles
from collab_core.doctor.machine import available_memory, disk, open_files, shared_memory
from collab_core.doctor.packages import package_checks
from collab_core.errors import Code, TaskError
from collab_core.run.settings import RunSettings, TaskSettings
from collab_trainer import TaskContext, fitness
from collab_trainer.fitness import model_checks


def installed(folder: Path, name: str, version: str, *lines: str) -> None:
    """A package as pip leaves it, as far as others can tell."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    )


def test_a_missing_package_and_a_wrong_version_are_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert all(check.ok for check in package_checks())
    installed(tmp_path, "hivemind", "1.0.9")
    python, packages = package_checks()
    assert python.ok
    assert packages.detail == "hivemind 1.0.9 is installed, and Collab needs <1.2,>=1.1.12"
    assert "pip install 'hivemind<1.2,>=1.1.12'" in packages.fix

    needs = ("Requires-Python: >=4", "Requires-Dist: no-such-package>=2", "Requires-Dist: another; extra == 'dev'")
    installed(tmp_path, "collab-train", "0.1.0", *needs)
    python, packages = package_checks()
    assert "and Collab needs >=4" in python.detail
    assert packages.detail == "no-such-package is not installed"
    assert packages.fix.endswith("pip install 'no-such-package>=2'")
    assert possible_roles([packages]) == {"train": False, "aux": False}


def test_a_model_that_does_not_fit_is_measured_without_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "available_memory", lambda: 12_000_000_000)
    options = {"width": 4096, "layers": 48, "heads": 64}
    settings = RunSettings(name="huge", task=TaskSettings(options=options))
    task, memory, room = model_checks(settings, TaskContext(), "cpu", Path("/"))
    assert task.ok
    assert not memory.ok
    assert memory.detail.startswith("the model has 9,667.8 million parameters and takes about ")
    assert "12 GB are free" in memory.detail
    assert memory.rules_out == BOTH
    assert "GB are free" in memory.fix
    assert room.name == "disk"


def test_files_that_a_container_has_read_do_not_count_as_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUPS", ((tmp_path, "memory.max", "memory.current", "inactive_file"),))
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("990000\n")
    (tmp_path / "memory.stat").write_text("anon 190000\nfile 800000\ninactive_file 700000\nactive_file 100000\n")
    assert available_memory() == 710_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 1_000_000


def test_limits_on_files_and_on_memory_are_seen(tmp_path: Path) -> None:
    files, space = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, files[1]))
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 10**9, space[1]))
        check, memory = open_files(), available_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        resource.setrlimit(resource.RLIMIT_AS, space)
    assert not check.ok
    assert possible_roles([check]) == {"train": True, "aux": True}
    assert check.fix.startswith("In the shell you start from: `ulimit -n ")
    assert memory <= 10**9
    assert open_files().ok
    assert shared_memory(tmp_path / "none").ok


def test_a_disk_with_too_little_room_rules_out_only_who_needs_more(small_disk: Path) -> None:
    check = disk(small_disk / "not" / "there" / "yet", {"train": 10**6, "aux": 10**9})
    assert check.rules_out == {"aux"}
    assert f"are free at {small_disk}, and the run needs 1.0 GB to aux" in check.detail
    assert disk(small_disk, {"train": 10**6}).ok


def test_whatever_is_raised_is_a_result() -> None:
    def look(error: Exception) -> Iterator[Check]:
        yield Check(name="first", ok=True, detail="fine")
        raise error

    told = TaskError(Code.TASK_NOT_INSTALLED, "No such task.", fix="pip install it")
    for error, words, rules_out in (
        (told, "No such task. (COLLAB-411)", BOTH),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "it needs the package 'torch'", BOTH),
        (OSError(errno.ENOSPC, "No space left on device"), "this could not be found out (OSError: ", frozenset()),
        (ZeroDivisionError("by 0"), "this could not be found out (ZeroDivisionError: by 0)", frozenset()),
    ):
        first, check = guarded("second", lambda error=error: look(error))  # type: ignore[misc]
        assert first.ok
        assert (check.name, check.ok, check.rules_out) == ("second", False, rules_out)
        assert check.detail.startswith(words)
        assert check.fix
