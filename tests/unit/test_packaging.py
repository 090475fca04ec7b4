"""What setup.cfg says is what is on the disk."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.command.build_py import build_py

import collab_core
from collab_core.run.template import FOLDER

ROOT = Path(__file__).parents[2]


def test_the_listed_packages_are_those_on_the_disk() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    places = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    found = set()
    for name, place in places.items():
        assert Path(place).name == name, "a package is never renamed on the way"
        for init in (ROOT / place).rglob("__init__.py"):
            if "templates" in init.parts:  # what `collab new` writes is data here
                continue
            found.add(".".join((name, *init.parent.relative_to(ROOT / place).parts)))
        assert (ROOT / place / "py.typed").exists()
    assert listed == found
    assert config["metadata"]["version"] == collab_core.__version__


def test_the_files_that_collab_new_writes_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    command = build_py(distribution)
    command.ensure_finalized()
    packed = {ROOT / folder / name for _, folder, _, names in command.data_files for name in names}
    wanted = {path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert wanted
    assert wanted <= packed
