"""Hashes of what a local training depends on: code, data, and everything that is installed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from blake3 import blake3

PACKAGES = ("collab-train", "torch", "transformers", "numpy")
PIECE_BYTES = 2**24


def package_versions() -> dict[str, str]:
    """Of those packages that make a model, and are here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment_hash() -> str:
    """Of the interpreter, the machine and every installed package."""
    packages = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()})
    facts = [platform.python_implementation(), platform.python_version(), platform.machine(), *packages]
    return blake3("\n".join(facts).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Empty if it cannot be read."""
    hasher = blake3()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                hasher.update(piece)
    except OSError:
        return ""
    return hasher.hexdigest()


def file_hashes(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """By path as it was given.

    Raises:
        OSError: one of them cannot be read.
    """
    # a name that is no text is kept as one that says so
    hashes = {str(path).encode(errors="backslashreplace").decode(): file_hash(folder / path) for path in paths}
    if missing := [path for path, digest in hashes.items() if not digest]:
        raise OSError(f"{missing[0]} cannot be read")
    return hashes
