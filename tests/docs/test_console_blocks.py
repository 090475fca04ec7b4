"""Commands in the docs are real: each one is parsed, and those of the tutorial are run."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import psutil
import pytest
from pages import DOCS, ROOT, Command, commands, generator, pages

TUTORIAL = DOCS / "tutorial.md"
WAIT_S = 180.0  # for what usually takes seconds: the machine may be busy
ALL = [command for page in pages() for command in commands(page)]


class Parser(argparse.ArgumentParser):
    """Fails the test instead of the process."""

    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


def parser_of(parameters: list[Any]) -> Parser:
    """A strict parser with the same arguments and options as a command of `collab`."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    for parameter in parameters:
        if not parameter.is_option:
            is_required = parameter.default is inspect.Parameter.empty
            parser.add_argument(parameter.name, nargs=None if is_required else "?")
            continue
        on, off = parameter.flags
        if parameter.is_flag:
            parser.add_argument(*on, *off, action="store_true", dest=parameter.name)
        elif get_origin(parameter.kind) is list:
            parser.add_argument(*on, action="append", type=get_args(parameter.kind)[0], dest=parameter.name)
        else:
            parser.add_argument(*on, type=parameter.kind, dest=parameter.name)
    return parser


@pytest.mark.parametrize("command", [c for c in ALL if c.text.startswith("collab ")], ids=str)
def test_collab_command_has_only_arguments_and_options_that_exist(command: Command) -> None:
    _, name, *arguments = shlex.split(command.text)
    parser_of(generator().commands()[name]).parse_args(arguments)


@pytest.mark.parametrize("command", [c for c in ALL if not c.text.startswith("collab ")], ids=str)
def test_other_command_is_one_of_this_repository(command: Command) -> None:
    match shlex.split(command.text):
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", "pytest", folder]:
            assert (ROOT / folder).is_dir()
        case ["python", script]:
            assert (ROOT / script).is_file()
        case ["source", ".venv/bin/activate"] | ["pre-commit", "install"]:
            pass
        case _:
            pytest.fail("teach this test what that is")


def test_options_named_in_the_text_exist() -> None:
    known = {"--help", "--version", "--check"}
    for parameters in generator().commands().values():
        for option in (parameter for parameter in parameters if parameter.is_option):
            on, off = option.flags
            known |= {*on, *off}
    for page in pages():
        named = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text()))
        assert named <= known, page.name


class Terminals:
    """Runs the commands of a page, each in a process of its own, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLLAB_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "COLUMNS": "120",
        }
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(self, command: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"terminal-{len(self._running)}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],  # exec: the process we know is the one that counts
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append((command, process, log))
        return process

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return next(log.read_text(errors="replace") for _, one, log in self._running if one is process)

    def finish(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until a command has ended well; returns what it printed."""
        self.wait_for(lambda: process.poll() is not None, "a command to end")
        assert process.returncode == 0, self.output(process)
        return self.output(process)

    def events(self) -> list[dict[str, Any]]:
        """Whole lines of every peer's event log."""
        texts = [path.read_text() for path in self.home.glob("*/*/events.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not happened():
            for command, process, log in self._running:
                assert process.poll() in (None, 0), f"{command}\n{log.read_text(errors='replace')}"
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.1)

    def close(self) -> list[str]:
        """End everything that was started, and what that started; returns what did not end when asked."""
        children = []
        for _, process, _ in self._running:
            if process.poll() is None:
                children += psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGINT)
        stubborn = []
        deadline = time.monotonic() + 15
        for command, process, _ in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stubborn.append(command)
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            stubborn.append(child.name())
            child.kill()
        return stubborn


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    assert terminals.close() == []


@pytest.mark.timeout(600)
def test_the_tutorial_works_as_written(terminals: Terminals) -> None:
    new, aux, first, second, status = [command.text for command in commands(TUTORIAL)]
    assert [text.split()[1] for text in (new, aux, first, second, status)] == ["new", "aux", "train", "train", "status"]

    assert "collab aux my-run" in terminals.finish(terminals.start(new))

    auxiliary = terminals.start(aux)
    terminals.wait_for((terminals.folder / "invite.txt").exists, "the invite")

    trainers = [terminals.start(first), terminals.start(second)]
    terminals.wait_for(lambda: any(event["event"] == "epoch" for event in terminals.events()), "the first epoch")

    # while they train, unless this machine is so slow that they are done before the question is asked
    seen = terminals.finish(terminals.start(status))
    assert seen.startswith("Run my-run, ")
    assert "aux" in seen

    for trainer in trainers:
        assert "Left at epoch 10; contributed" in terminals.finish(trainer)
    terminals.wait_for(lambda: "epoch   10" in terminals.output(auxiliary), "the auxiliary's last epoch")
    epochs = [event for event in terminals.events() if event["event"] == "epoch"]
    assert len({event["root"] for event in epochs if event["epoch"] == 10}) == 1
    assert {name for event in epochs for name in event["members"]}

    auxiliary.send_signal(signal.SIGINT)
    assert "Left at epoch 10" in terminals.finish(auxiliary)
