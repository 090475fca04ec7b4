"""Python and the packages that Collab needs, as its own metadata lists them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from collab_core.doctor.check import BOTH, Check

DISTRIBUTION = "collab-train"
SHOWN = ("collab-train", "torch", "hivemind")  # what people are asked for when something is wrong


def package_checks() -> Iterator[Check]:
    """Which Python this is, and whether every package is there in a version we know to work."""
    yield _python()
    yield _packages()


def _python() -> Check:
    here = platform.python_version()
    try:
        wanted = metadata(DISTRIBUTION)["Requires-Python"] or ""
    except PackageNotFoundError:  # run from its sources
        wanted = ""
    if wanted:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(wanted).contains(here, prereleases=True):
            return Check(
                name="python",
                ok=False,
                detail=f"Python {here} ({sys.executable}), and Collab needs {wanted}",
                fix=f"Make an environment with a Python {wanted} and install Collab there: pip install {DISTRIBUTION}",
                rules_out=BOTH,
            )
    return Check(name="python", ok=True, detail=f"{here}, {platform.system()} {platform.machine()}")


def _packages() -> Check:
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        fix = f"pip install --upgrade {DISTRIBUTION}"
        return Check(name="packages", ok=False, detail="packaging is not installed", fix=fix, rules_out=BOTH)
    try:
        listed = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return Check(name="packages", ok=True, detail="Collab runs from its sources, so no versions are known to lack")
    wanted = [one for one in listed if one.marker is None or one.marker.evaluate({"extra": ""})]
    faults, install = [], []
    for requirement in wanted:
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            faults.append(f"{requirement.name} is not installed")
        else:
            if requirement.specifier.contains(here, prereleases=True):
                continue
            faults.append(f"{requirement.name} {here} is installed, and Collab needs {requirement.specifier}")
        install.append(f"'{requirement.name}{requirement.specifier}'")
    if faults:
        fix = f"{sys.executable} -m pip install {' '.join(install)}"
        return Check(name="packages", ok=False, detail="; ".join(faults), fix=fix, rules_out=BOTH)
    shown = ", ".join(f"{name} {version(name)}" for name in SHOWN)
    return Check(name="packages", ok=True, detail=f"{shown}; all {len(wanted)} that Collab needs fit")
