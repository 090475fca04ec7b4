"""The unit and the compose file start commands that exist. `make lint` looks at the rest of `deploy/`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from pages import ROOT
from typer.main import get_group

from collab_cli.app import app

UNIT = ROOT / "deploy" / "collab-aux.service"


def parse(command: list[str]) -> None:
    """Fails if there is no such command, or it has no such option."""
    name, *arguments = command
    get_group(app).commands[name].make_context(name, arguments)


def test_the_compose_file_starts_an_auxiliary() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    parse(compose["services"]["aux"]["command"])


def test_the_unit_starts_an_auxiliary_and_systemd_accepts_it(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *command = shlex.split(line)
    parse(command)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, "/bin/true"))  # it is to be installed there
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_image_has_what_its_packages_link_to() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    links = [path for name in ("core", "cli", "trainer", "aux_peer", "dashboard") for path in (ROOT / name).rglob("*")]
    targets = {path.resolve().relative_to(ROOT).parts[0] for path in links if path.is_symlink()}
    assert targets
    assert targets <= let_in
