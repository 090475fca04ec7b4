"""`collab new --template custom`: a package that can be installed, passes its own test, and is trained by two peers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from installing import make_environment
from processes import collab, environment

from collab_core.run import RunFolder, run_template, template_files
from collab_core.templates import Template
from collab_trainer.custom import is_custom


def run(folder: Path, *command: str) -> str:
    """A command in the test's own environment; returns what it printed."""
    variables = {**environment(), **make_environment(folder / "environment"), "COLLAB_HOME": str(folder / "home")}
    finished = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.timeout(600)
def test_the_example_package_is_installed_tested_and_trained(tmp_path: Path) -> None:
    said = run(tmp_path, "collab", "new", "my-shapes", "--template", "custom")
    typed = [line.split() for line in said.splitlines() if line.startswith("  ")]
    install, test, demo, aux = typed
    assert [words[0] for words in typed] == ["pip", "python", "collab", "collab"]
    assert aux == ["collab", "aux", "my-shapes"]

    run(tmp_path, *install)
    assert "3 passed" in run(tmp_path, *test)
    report = json.loads(run(tmp_path, *demo, "--epochs", "12", "--json"))
    assert report["loss"]["last"] < 0.8 * report["loss"]["first"]
    assert report["loss"]["floor"] is None
    assert len(report["peers"]) == 3
    assert {peer["model_root"] for peer in report["peers"]} == {report["model_root"]}
    assert "pictures are named rightly" in report["sample"]


@pytest.mark.parametrize("template", Template)
def test_every_template_is_valid(tmp_path: Path, template: Template) -> None:
    text, files = run_template("my-run", template), template_files("my-run", template)
    assert RunFolder.create(tmp_path / "my-run", text, files).settings().name == "my-run"


@pytest.mark.parametrize(
    ("name", "module"),
    [("my-run", "my_run_task"), ("3d", "run_3d_task"), ("a--b-", "a__b__task"), ("import", "import_task")],
)
def test_the_package_is_named_after_the_run(tmp_path: Path, name: str, module: str) -> None:
    folder = RunFolder.create(
        tmp_path / name, run_template(name, Template.CUSTOM), template_files(name, Template.CUSTOM)
    )
    task = folder.settings().task
    assert task.name == f"{module}.pictures:Pictures"
    assert is_custom(task.name)
    written = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file()}
    assert f"task/src/{module}/pictures.py" in written
    for path in written:
        if name != "my-run" and path.startswith("task/"):
            text = (folder.path / path).read_text()
            assert "my_run" not in text
            assert "my-run" not in text
    assert f'"{task.name}"' in (folder.path / "task" / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["", "My Run"])
def test_a_bad_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    finished = collab("new", str(tmp_path / name) if name else "/", "--template", "custom")
    assert finished.returncode == 2
    assert "COLLAB-108" in finished.stderr
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_behind_if_the_package_cannot_be_written(tmp_path: Path) -> None:
    """Here because a file stands where a folder must be."""
    files = {"task": b"", "task/pyproject.toml": b""}
    with pytest.raises(Exception, match="cannot be written"):
        RunFolder.create(tmp_path / "a" / "b", run_template("my-run"), files)
    assert os.listdir(tmp_path) == []
