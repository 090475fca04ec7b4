"""Commands in the docs are real: each one is parsed, and those of the tutorial are run here."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import pytest
from pages import DOCS, ROOT, Command, commands, generator, pages
from terminals import Terminals

TUTORIAL = DOCS / "tutorial.md"
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
            is_list = get_origin(parameter.kind) is list
            parser.add_argument(parameter.name, nargs="*" if is_list else None if is_required else "?")
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
    if name not in generator("generator.commands").commands():  # a group: `collab models log`
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    parser_of(generator("generator.commands").commands()[name]).parse_args(arguments)


@pytest.mark.parametrize("command", [c for c in ALL if not c.text.startswith("collab ")], ids=str)
def test_other_command_is_one_of_this_repository(command: Command) -> None:
    match shlex.split(command.text):
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", "pytest", folder]:
            assert (ROOT / folder).is_dir() or f'title="{folder}/test_' in command.page.read_text()
        case ["python", script]:
            assert (ROOT / script).is_file() or f'title="{script}"' in command.page.read_text()
        case ["pip", "install", "-e", folder]:
            assert f'title="{folder}/pyproject.toml"' in command.page.read_text(), "what is installed is on the page"
        case ["source", ".venv/bin/activate"] | ["pre-commit", "install"]:
            pass
        case _:
            pytest.fail("teach this test what that is")


def test_options_named_in_the_text_exist() -> None:
    known = {"--help", "--version", "--check"}
    for parameters in generator("generator.commands").commands().values():
        for option in (parameter for parameter in parameters if parameter.is_option):
            on, off = option.flags
            known |= {*on, *off}
    known |= set(re.findall(r'"(--[a-z]+)"', (ROOT / "benchmarks" / "__main__.py").read_text()))
    for page in pages():
        text = page.read_text()
        if page.name == "counterparts.md":  # the first column is TRecover's
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
        assert named <= known, page.name


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
