"""The notebooks run from top to bottom, from the wheel, against a real swarm; a wrong invite in them ends in words."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import SwarmOfProcesses
from installing import build_wheel, make_environment
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from pages import ROOT
from processes import write_run

from collab_core.run.invite import Invite

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB, KAGGLE, SOLO = NOTEBOOKS
WAIT_S = 150.0
ENOUGH = 3
TO_NOBODY = Invite(
    run_hash=bytes(32),
    fingerprint=bytes(16),
    initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQ1fJeFovNaRwDh47pzWPTNdRpBTBG4cEwHsVNs1Td9au",),
).encode()
WHERE = "import collab_cli\nprint(collab_cli.__file__)"


@pytest.fixture(scope="module")
def wheel_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A new environment with a kernel, in which `pip install collab-train` takes the wheel of this source."""
    folder = tmp_path_factory.mktemp("notebooks")
    wheel = build_wheel(folder)
    environment = make_environment(folder / "env")
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [f"{folder}/env/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    return {
        **environment,
        "JUPYTER_PATH": str(folder / "jupyter"),
        "PIP_FIND_LINKS": str(wheel.parent),
        "PIP_FORCE_REINSTALL": "1",  # the source is in sight too, and has the same version
        "PIP_NO_DEPS": "1",
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": "1",
    }


def read(path: Path, **form: str) -> Any:
    """A notebook with its form filled in."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    for name, value in form.items():
        cells = [cell for cell in notebook.cells if re.search(rf"^{name} = ", cell.source, re.MULTILINE)]
        assert len(cells) == 1, f"{path.name} has no field {name}"
        cells[0].source = re.sub(rf"^{name} = \S+", f"{name} = {value!r}", cells[0].source, flags=re.MULTILINE)
    return notebook


def text_of(notebook: Any) -> str:
    """All that its cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(json.dumps(output) for output in outputs)


async def run(notebook: Any, folder: Path, has_contributed: Callable[[], bool]) -> None:
    """From top to bottom; once it has contributed somebody presses Stop."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        # by TCP a kernel gets ports that were free a moment ago, and another test may have them by then
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/socket")
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, km=kernel, timeout=WAIT_S, resources=where)
        running = asyncio.ensure_future(client.async_execute())
        try:
            while not running.done() and not has_contributed():
                await asyncio.sleep(0.2)
            if not running.done():
                await kernel.interrupt_kernel()
            await running
        finally:
            await kernel.shutdown_kernel(now=True)


def contributors(events: Path) -> set[str]:
    """Who took part in several epochs: one is not enough for a curve."""
    lines = events.read_text().splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    counted = Counter(name for event in found if event["event"] == "epoch" for name in event["members"])
    return {name for name, count in counted.items() if count >= ENOUGH}


@pytest.mark.timeout(300)
def test_all_three_contribute_to_a_run(
    swarm: SwarmOfProcesses, wheel_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aux = swarm.aux(write_run(tmp_path))
    invite = swarm.invite()
    for name, value in wheel_environment.items():
        monkeypatch.setenv(name, value)
    log = aux.state_dir / "events.jsonl"
    kaggle = read(KAGGLE, invite=invite, name="kaggler")
    kaggle.cells.append(nbformat.v4.new_code_cell(WHERE))  # type: ignore[no-untyped-call]
    colab = read(COLAB, invite=invite, name="colaber")
    solo = read(SOLO)
    alone = tmp_path / "solo"

    async def all_at_once() -> None:
        await asyncio.gather(
            run(kaggle, tmp_path / "kaggle", lambda: {"kaggler", "colaber"} <= contributors(log)),
            run(colab, tmp_path / "colab", lambda: {"kaggler", "colaber"} <= contributors(log)),
            run(solo, alone, lambda: bool(contributors(alone / "collab-aux-my-run" / "events.jsonl"))),
        )

    asyncio.run(all_at_once())
    for notebook in (kaggle, colab, solo):
        assert "Thank you!" in text_of(notebook), text_of(notebook)[-3000:]
        assert "<polyline" in text_of(notebook), "the curve of the loss"
    assert f"{wheel_environment['VIRTUAL_ENV']}/lib" in kaggle.cells[-1].outputs[0].text, "it ran from the wheel"
    assert "contributed" in text_of(solo)
    assert "collab train collab1_" in text_of(solo)
    assert contributors(alone / "collab-aux-my-run" / "events.jsonl")
    assert {"kaggler", "colaber"} <= contributors(log)


@pytest.mark.timeout(200)
def test_a_missing_or_wrong_invite_ends_in_words(
    wheel_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wheel_environment.items():
        monkeypatch.setenv(name, value)
    wrong = [
        (read(COLAB, invite=""), "Paste the invite"),
        (read(COLAB, invite="collab1_nonsense"), "COLLAB-11"),
        (read(KAGGLE, invite="collab1_nonsense"), "COLLAB-11"),
        (read(KAGGLE, invite=TO_NOBODY), "COLLAB-201"),
        (read(SOLO), "A run cannot be named"),
    ]
    (hosting,) = (cell for cell in wrong[-1][0].cells if "host(" in cell.source)
    hosting.source = hosting.source.replace('"my-run"', '"My Run"')
    for number, (notebook, words) in enumerate(wrong):
        asyncio.run(run(notebook, tmp_path / str(number), lambda: False))
        assert words in text_of(notebook), text_of(notebook)
        assert "Traceback" not in text_of(notebook)


@pytest.mark.timeout(200)
def test_who_could_not_install_collab_is_told_what_to_do(
    wheel_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wheel is to be found, and this clone's own sources are out of sight."""
    (tmp_path / "collab_cli.py").write_text("raise ModuleNotFoundError(name=__name__)\n")
    for name, value in {**wheel_environment, "PIP_FIND_LINKS": "", "PYTHONPATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for path in NOTEBOOKS:
        notebook = read(path)
        asyncio.run(run(notebook, tmp_path / path.stem, lambda: False))
        assert "No matching distribution found for collab-train" in text_of(notebook)
        assert "put the wheel" in text_of(notebook).replace("its wheel", "the wheel")
        assert "Traceback" not in text_of(notebook)


def test_notebooks_hold_no_output_and_no_credentials() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        notebook = read(path)
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
        assert not re.search(r"hf_\w{8}|api[_-]?key|token\s*=", path.read_text(), re.IGNORECASE), os.fspath(path)
