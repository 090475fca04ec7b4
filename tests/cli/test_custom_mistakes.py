"""What people see when a run's task is somebody else's package, and something is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SwarmOfProcesses
from processes import collab, write_run

from collab_core.run.template import FOLDER

PICTURES = FOLDER / "custom" / "task" / "src" / "my_run_task"


def install(folder: Path, old: str = "", new: str = "") -> dict[str, str]:
    """The example task in a folder, as pip would leave it, with something replaced; how to see it."""
    package = folder / "my_run_task"
    package.mkdir(parents=True)
    for path in PICTURES.glob("*.py"):
        (package / path.name).write_text(path.read_text().replace(old, new) if old else path.read_text())
    metadata = folder / "my_run_task-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-run-task\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[collab.tasks]\npictures = my_run_task.pictures:Pictures\n")
    return {"PYTHONPATH": str(folder)}


def custom_run(folder: Path, package: str = "") -> Path:
    run = write_run(folder, task__name="my_run_task.pictures:Pictures", task__package=package)
    text = (run / "run.toml").read_text()
    options = text[text.index("[task.options]") : text.index("[strategy]")]
    (run / "run.toml").write_text(text.replace(options, "[task.options]\nsize = 8\nwidth = 4\n\n"))
    return run


def test_an_organiser_without_the_package(tmp_path: Path) -> None:
    finished = collab("aux", str(custom_run(tmp_path)), "--state-dir", str(tmp_path / "s"))
    assert finished.returncode == 2
    assert "COLLAB-411" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.timeout(240)
def test_volunteers_without_the_package_or_with_a_broken_one_are_told_and_the_run_goes_on(
    swarm: SwarmOfProcesses, tmp_path: Path
) -> None:
    good = install(tmp_path / "good")
    broken = install(tmp_path / "broken", 'batch["labels"])', 'batch["label"])')
    aux = swarm.aux(custom_run(tmp_path, "my-run-task>=0.1"), env=good)

    lacking = collab("train", swarm.invite(), "--state-dir", str(tmp_path / "lacking"))
    words = " ".join(lacking.stderr.replace("│", " ").split())
    assert lacking.returncode == 2, words
    assert "COLLAB-411" in words
    assert "pip install 'my-run-task>=0.1'" in words

    options = (
        "train",
        swarm.invite(),
        "--host-maddrs",
        "/ip4/127.0.0.1/tcp/0",
        "--state-dir",
        str(tmp_path / "broken-s"),
    )
    failed = collab(*options, env=broken)
    words = " ".join(failed.stderr.replace("│", " ").split())
    assert failed.returncode == 2, words
    assert "COLLAB-413" in words
    assert (
        "loss() of the task my_run_task.pictures:Pictures failed: KeyError: 'label' (my_run_task/pictures.py," in words
    )
    assert "Traceback" not in words
    told = collab(*options, "--verbose", env=broken)
    assert "Traceback" in told.stderr
    assert "KeyError: 'label'" in told.stderr

    trainer = swarm.trainer("good", "--n-workers", "2", env=good)
    trainer.wait_for_epoch(3)
    aux.wait_for_epoch(3)
    assert trainer.roots()[3] == aux.roots()[3]
