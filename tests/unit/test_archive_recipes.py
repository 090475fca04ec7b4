"""What was recorded can be run again, and whether the same model comes out is seen, not believed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from collab_core.archive import Archive, Version
from collab_core.archive.environment import environment_hash
from collab_core.archive.recipes import record, replay
from collab_core.archive.variants import local_provenance, save_checkpoint
from collab_core.errors import ArchiveError, Code

TRAINING = """
import os, sys
import numpy as np
from safetensors.numpy import load_file, save_file

parent, output, data = sys.argv[1:]
weights = load_file(parent + "/model.safetensors")
rng = np.random.default_rng(int(os.environ["COLLAB_SEED"]))
step = float(open(data).read())
weights["head"] = weights["head"] + rng.standard_normal(weights["head"].shape).astype(np.float32) * np.float32(step)
os.mkdir(output)
save_file(weights, output + "/model.safetensors")
"""
COPY = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
COMMAND = [sys.executable, "train.py", "{parent}", "{output}", "step.txt"]


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    folder = tmp_path / "workshop"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    (folder / "step.txt").write_text("0.01")
    return folder


@pytest.fixture
def base(archive: Archive, tmp_path: Path) -> Version:
    rng = np.random.default_rng(0)
    shapes = {"body": (200, 100), "head": (10, 100)}
    save_file({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "base.safetensors")
    return save_checkpoint(archive, tmp_path / "base.safetensors")


def recorded(archive: Archive, base: Version, workshop: Path, seed: int = 3) -> Version:
    return record(archive, base, COMMAND, seed=seed, data=[Path("step.txt")], folder=workshop)


def fails(archive: Archive, version: Version, workshop: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        replay(archive, version, workshop)
    assert caught.value.code is Code.RECIPE_FAILED
    return caught.value.message


def test_a_deterministic_training_is_proved_to_be_one(archive: Archive, base: Version, workshop: Path) -> None:
    version = recorded(archive, base, workshop)
    assert version.level == "R1"
    recipe = version.provenance.recipe
    assert recipe is not None
    assert (recipe["code"].keys(), recipe["data"].keys()) == ({"train.py"}, {"step.txt"})
    assert replay(archive, version, workshop) == "R2"
    again = Archive(archive.folder)
    assert again.find(version.root).level == "R2"
    assert again.find(version.root).provenance.recipe == recipe
    again.close()


def test_what_changed_since_is_named(archive: Archive, base: Version, workshop: Path) -> None:
    version = recorded(archive, base, workshop)
    (workshop / "step.txt").write_text("0.02")
    assert "data step.txt" in fails(archive, version, workshop)
    (workshop / "step.txt").write_text("0.01")
    (workshop / "train.py").write_text(TRAINING + "\n")
    assert "code train.py" in fails(archive, version, workshop)
    assert archive.find(version.root).level == "R1"


def test_chance_is_noticed(archive: Archive, base: Version, workshop: Path) -> None:
    (workshop / "train.py").write_text(TRAINING.replace('int(os.environ["COLLAB_SEED"])', "None"))
    version = recorded(archive, base, workshop)
    assert "not deterministic" in fails(archive, version, workshop)


def test_a_training_by_chance_is_retrainable_if_its_metric_comes_out_again(
    archive: Archive, base: Version, workshop: Path
) -> None:
    chance = TRAINING.replace('int(os.environ["COLLAB_SEED"])', "None")
    (workshop / "train.py").write_text(chance + "print('loss:')\nprint(0.5 + rng.uniform(0, 0.01))\n")
    version = record(archive, base, COMMAND, data=[Path("step.txt")], tolerance=0.05, folder=workshop)
    assert replay(archive, version, workshop) == "R3"
    assert archive.find(version.root).level == "R3"
    recipe = version.provenance.recipe
    assert recipe is not None
    assert 0.5 <= recipe["metric"] <= 0.51
    (workshop / "train.py").write_text(chance + "print(rng.uniform(1, 2) * 10 ** rng.integers(9))\n")
    strict = record(archive, base, COMMAND, data=[Path("step.txt")], tolerance=1e-6, folder=workshop)
    assert "its metric is" in fails(archive, strict, workshop)
    assert archive.find(strict.root).level == "R1"
    (workshop / "train.py").write_text(chance)
    with pytest.raises(ArchiveError, match="not its metric"):
        record(archive, base, COMMAND, tolerance=0.05, folder=workshop)


def test_what_is_saved_says_where_it_was_made(archive: Archive, base: Version, workshop: Path, tmp_path: Path) -> None:
    assert base.provenance.packages["numpy"] == np.__version__
    assert base.provenance.environment == environment_hash()
    save_file({"head": np.zeros(3, np.float32)}, tmp_path / "own.safetensors")
    origin = local_provenance(seed=7, data=[Path("step.txt")], code=[Path("train.py")], folder=workshop)
    made = save_checkpoint(archive, tmp_path / "own.safetensors", parent=base, provenance=origin)
    again = Archive(archive.folder)
    found = again.find(made.root).provenance
    again.close()
    assert found == origin
    assert found.seed == 7
    assert found.data == {"step.txt": blake3(b"0.01").hexdigest()}
    assert found.code == {"train.py": blake3(TRAINING.encode()).hexdigest()}
    with pytest.raises(ArchiveError, match=r"missing.* cannot be read"):
        local_provenance(data=[Path("missing.txt")], folder=workshop)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "pass", "{output}"], "wrote nothing"),
        ([sys.executable, "-c", "raise SystemExit('no luck')", "{output}"], "no luck"),
        (["no-such-program", "{output}"], "cannot be run"),
        ([sys.executable, "train.py"], "{output} is missing"),
        ([sys.executable, "-c", COPY, "{parent}", "{output}"], "here already"),
    ],
)
def test_commands_that_make_nothing_are_said(
    archive: Archive, base: Version, workshop: Path, command: list[str], why: str
) -> None:
    with pytest.raises(ArchiveError) as caught:
        record(archive, base, command, folder=workshop)
    assert caught.value.code is Code.RECIPE_FAILED
    assert why in caught.value.message
    assert len(archive.versions()) == 1


def test_without_a_recipe_there_is_nothing_to_run(archive: Archive, base: Version) -> None:
    with pytest.raises(ArchiveError) as caught:
        replay(archive, base)
    assert caught.value.code is Code.NO_RECIPE
