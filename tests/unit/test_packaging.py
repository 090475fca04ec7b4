"""What setup.cfg says is what is on the disk."""

from __future__ import annotations

import configparser
from pathlib import Path

import collab_core

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
            found.add(".".join((name, *init.parent.relative_to(ROOT / place).parts)))
        assert (ROOT / place / "py.typed").exists()
    assert listed == found
    assert config["metadata"]["version"] == collab_core.__version__
