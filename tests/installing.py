"""The wheel of this clone, and environments of a test's own with everything that this one has.

Packages installed there are nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

SOURCE = Path(__file__).parents[1]
SCRIPTS = {"pip": "from pip._internal.cli.main import main", "collab": "from collab_cli.app import main"}


def build_wheel(folder: Path) -> Path:
    """The wheel, from a copy of the sources: what another build leaves in theirs is in nobody's way and in no wheel."""
    copy = folder / "source"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "site"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder / "wheels"), str(copy)], check=True)
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


def make_environment(folder: Path) -> dict[str, str]:
    """Environment variables in which `python`, `pip` and `collab` are those of a new environment. Needs no network."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    ours = sysconfig.get_path("purelib")
    # addsitedir, not the bare path: ours has .pth files too, which lead to Collab's own sources
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for name, line in SCRIPTS.items():
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python\nimport sys\n{line}\nsys.exit(main())\n")
        script.chmod(0o755)
    return {
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of `build isolation`: off
    }
