"""Models that can be trained again: what was run on which version, and whether running it again gives the same root.

A recipe is a command with `{parent}` and `{output}` in it, the hashes of the code and data it used, of the environment,
and a seed. Nothing guarantees that a training is deterministic; running it again and comparing roots does. One that is
not may still lead to a model that is as good: then the number that the command prints last comes out about the same.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collab_core.archive.archive import Archive
from collab_core.archive.environment import environment_hash, file_hash, file_hashes, package_versions
from collab_core.archive.recovery import recover
from collab_core.archive.variants import read_checkpoint, save_checkpoint
from collab_core.archive.version import Provenance, Version
from collab_core.errors import ArchiveError, Code
from collab_core.tree import StateTree

PARENT, OUTPUT, SEED = "{parent}", "{output}", "{seed}"
EXACT, REPLAYABLE, RETRAINABLE = "R1", "R2", "R3"
# what makes libraries take the same way every time
STEADY = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
MAX_SHOWN = 500


def record(
    archive: Archive,
    parent: Version,
    command: Sequence[str],
    *,
    seed: int = 0,
    data: Sequence[Path] = (),
    tolerance: float | None = None,
    folder: Path | None = None,
) -> Version:
    """Run a command that makes a model from a version, and keep what comes out with its recipe.

    Args:
        archive: which has the parent.
        parent: what it is made from.
        command: with `{parent}` and `{output}`, and `{seed}` if it likes.
        seed: also in the environment, as COLLAB_SEED.
        data: files it reads.
        tolerance: the command prints a metric as its last line, and a model whose metric differs by no more than this
            share of it is as good.
        folder: where it runs.

    Raises:
        ArchiveError: RECIPE_FAILED, BAD_CHECKPOINT.
    """
    where = folder or Path.cwd()
    if not any(OUTPUT in word for word in command):
        raise _failed(f"the command does not say where its result goes: {OUTPUT} is missing in it")
    named = [Path(word) for word in command[1:] if PARENT not in word and OUTPUT not in word]  # the first is a program
    code = [path for path in named if path not in data and _is_file(where / path)]
    recipe: dict[str, Any] = {
        "command": list(command),
        "seed": seed,
        "code": _hashes(where, code),
        "data": _hashes(where, data),
        "environment": environment_hash(),
    }
    with tempfile.TemporaryDirectory(prefix="collab-recipe-") as name:
        output, seconds, metric = _run(archive, parent, recipe, where, Path(name))
        if tolerance is not None:
            if metric is None:
                raise _failed("the last line that the command printed is not its metric, and there is a tolerance")
            recipe |= {"metric": metric, "tolerance": tolerance}
        tensors, _ = read_checkpoint(output, parent)
        root = StateTree.of(tensors).root
        if any(known.root == root for known in archive.versions()):
            raise _failed(f"what came out is here already, as {root[:12]}")
        provenance = Provenance(recipe=recipe | {"seconds": round(seconds, 3)}, packages=package_versions())
        return save_checkpoint(archive, output, parent=parent, provenance=provenance)


def replay(archive: Archive, version: Version, folder: Path | None = None) -> str:
    """Run a version's recipe again; which level that proves.

    If the root comes out, the version is replayable (R2). If only its metric does, within the tolerance that was
    recorded, it is retrainable (R3).

    Raises:
        ArchiveError: NO_RECIPE, or RECIPE_FAILED: code or data changed, the command failed, or something else came out.
    """
    where = folder or Path.cwd()
    recipe = version.provenance.recipe
    parent = next((one for one in archive.versions() if one.root == version.parent), None)
    if recipe is None or parent is None:
        raise ArchiveError(
            Code.NO_RECIPE,
            f"Version {version.root[:12]} " + ("has no recipe." if recipe is None else "has lost its parent."),
            fix="Only what `collab models record` made from a version in the archive can be trained again.",
        )
    for kind in ("code", "data"):
        for path, digest in recipe[kind].items():
            if file_hash(where / path) != digest:
                raise _failed(f"the {kind} {path} is not what it was, or not in {where}")
    with tempfile.TemporaryDirectory(prefix="collab-recipe-") as name:
        output, _, metric = _run(archive, parent, recipe, where, Path(name))
        tensors, _ = read_checkpoint(output, parent)
        level = REPLAYABLE if StateTree.of(tensors).root == version.root else _level_by_metric(recipe, metric)
    if level == REPLAYABLE or version.level == EXACT:  # what was proved once stays so
        archive.promote(version, level)
    return level


def _level_by_metric(recipe: Mapping[str, Any], metric: float | None) -> str:
    """R3, if another model came out that is as good."""
    before, tolerance = recipe.get("metric"), recipe.get("tolerance")
    told = "another model came out, so this training is not deterministic here"
    if isinstance(before, float | int) and isinstance(tolerance, float | int):
        if metric is not None and abs(metric - before) <= tolerance * abs(before):
            return RETRAINABLE
        told += f", and its metric is {metric} instead of {before} within {tolerance:.0%}"
    if recipe["environment"] != environment_hash():
        told += ". The environment is another one, too"
    raise _failed(told)


def _run(
    archive: Archive, parent: Version, recipe: Mapping[str, Any], folder: Path, scratch: Path
) -> tuple[Path, float, float | None]:
    """Where the result is, how long it took, and the number that was printed last."""
    base, output = scratch / "parent", scratch / "output"
    recover(archive, parent, base)
    words = {PARENT: str(base), OUTPUT: str(output), SEED: str(recipe["seed"])}
    command = []
    for word in recipe["command"]:
        for placeholder, value in words.items():
            word = word.replace(placeholder, value)
        command.append(word)
    environment = {**os.environ, **STEADY, "COLLAB_SEED": str(recipe["seed"])}
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise _failed(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-MAX_SHOWN:]
        raise _failed(f"the command ended with {done.returncode}: {said}")
    found = next((path for path in (output, output.with_suffix(".safetensors")) if path.exists()), None)
    if found is None:
        raise _failed(f"the command wrote nothing to {OUTPUT}")
    return found, time.monotonic() - start, _last_number(done.stdout)


def _last_number(said: bytes) -> float | None:
    """What a command printed last, if that is a number."""
    lines = said.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        number = float(last)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _hashes(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    try:
        return file_hashes(folder, paths)
    except OSError as error:
        raise _failed(str(error)) from error


def _failed(why: str) -> ArchiveError:
    return ArchiveError(
        Code.RECIPE_FAILED,
        f"The recipe did not lead to the model: {why}.",
        fix="Run it where its code and data are, in the environment it was recorded in.",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name: a program in a word
        return False
