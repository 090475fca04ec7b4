"""Tasks from installed packages: only what is registered is run, and every mistake is told as what it is."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collab_core.errors import Code, ConfigError, TaskError
from collab_core.run import parse_settings
from collab_core.run.settings import TaskSettings
from collab_core.telemetry import EventLog
from collab_trainer import load_task, prepare
from collab_trainer.batches import Batches
from collab_trainer.data_journal import DataJournal

GOOD = """
from typing import Annotated, Literal
import torch
from pydantic import Field, model_validator
from collab_trainer import NumberedBlocks, TaskOptions, fill_parameters

class Options(TaskOptions):
    width: Annotated[int, Field(ge=1, le=9)] = 3
    noise: Annotated[float, Field(ge=0)] = 0.5
    kind: Literal["flat", "round"] = "flat"
    is_slow: bool = False

    @model_validator(mode="after")
    def _both(self):
        if self.width == 9 and self.is_slow:
            raise ValueError("width = 9 is never slow")
        return self

class Line:
    Options = Options
    floor = None

    def __init__(self, *, seed, options):
        self.seed, self.options = seed, options

    def build_model(self):
        model = torch.nn.Linear(self.options.width, 1)
        fill_parameters(model, seed=self.seed)
        return model

    def blocks(self, *, seed, position):
        return NumberedBlocks(seed, position)

    def samples(self, block):
        return {"x": torch.full((4, self.options.width), float(block.number))}

    def loss(self, model, batch):
        return model(batch["x"]).mean()

    def evaluate(self, model):
        return 1

    def sample(self, model):
        return "a line"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one module on the path, registered or not, as pip would leave it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(source: str, *, module: str = "line_task", registers: str | None = "line_task:Line") -> None:
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        if registers is not None:
            (metadata / "entry_points.txt").write_text(f"[collab.tasks]\nany = {registers}\n")

    yield write  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.partition(".")[0].endswith("_task"):
            del sys.modules[name]


def load(name: str = "line_task:Line", *, package: str = "", **options: Any) -> Any:
    return load_task(TaskSettings(name=name, package=package, seed=1, options=options))


def refused(code: Code, *words: str, name: str = "line_task:Line", package: str = "", **options: Any) -> TaskError:
    with pytest.raises(TaskError) as caught:
        load(name, package=package, **options)
    assert caught.value.code is code, str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def test_a_registered_class_gets_the_seed_and_its_options(install: Install) -> None:
    install(GOOD)
    task = load(width=5)
    model = task.build_model()
    assert model.weight.shape == (1, 5)
    assert torch.equal(model.weight, load(width=5).build_model().weight)
    assert task.floor is None
    assert task.evaluate(model) == 1.0
    assert task.sample(model) == "a line"
    settings = parse_settings({"name": "a", "task": {"name": "line_task:Line", "options": {"width": 2}}}, "here")
    assert len(prepare(settings, Path()).initial_root) == 64


def test_spaces_in_the_registration_do_not_matter(install: Install) -> None:
    install(GOOD, registers="line_task : Line")
    load()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_data_reaches_the_training_loop(install: Install, tmp_path: Path, num_workers: int) -> None:
    install(GOOD)
    events = EventLog(tmp_path / "events.jsonl")
    journal = DataJournal(tmp_path / "data.json", "run", events)
    batches = Batches(load(width=1), journal, batch_size=8, num_workers=num_workers)
    try:
        rows = torch.cat([next(batches)["x"] for _ in range(3)])
        seen = Counter(rows.flatten().tolist())
        assert len(seen) == 6, "one of them came twice"
        assert set(seen.values()) == {4}, "a block is not whole"
        assert num_workers or set(seen) == set(range(6))  # with workers, a later one may be ready sooner
    finally:
        batches.close()
        events.close()


@pytest.mark.parametrize("name", ["os:system", "antigravity:x", "this:d", "__main__:x", "collab_core.errors:Code"])
def test_a_manifest_cannot_make_anything_else_run(name: str) -> None:
    module = name.partition(":")[0]
    was_there = module in sys.modules
    error = refused(Code.TASK_NOT_INSTALLED, name, name=name)
    assert (module in sys.modules) == was_there
    assert "pip install" not in str(error)


def test_an_installed_package_that_does_not_register_is_not_run(install: Install) -> None:
    install("raise SystemExit(7)", registers=None)
    refused(Code.TASK_NOT_INSTALLED, "'line_task' is installed", "does not register", "collab.tasks", "line_task:Line")


def test_another_class_of_a_registering_package_is_not_run(install: Install) -> None:
    install(GOOD)
    refused(Code.TASK_NOT_INSTALLED, "Did you mean 'line_task:Line'?", name="line_task:Lines")


def test_another_version_than_the_run_wants_is_refused(install: Install) -> None:
    install(GOOD)
    error = refused(Code.TASK_NOT_INSTALLED, "wants line-task>=1.1", "version 1.0 is", package="line-task>=1.1")
    assert "`pip install 'line-task>=1.1'`" in error.fix
    for package in ("line-task>=1.0,<2", "Line.Task==1.0", "line_task", "a-fork-of-it>=3"):
        load(package=package)
    with pytest.raises(ConfigError, match=r"line-task>=1\.\.\*"):
        load(package="line-task>=1..*")


def test_a_missing_package_says_what_to_install() -> None:
    error = refused(Code.TASK_NOT_INSTALLED, "no package 'line_task'", package="line-task>=1.0")
    assert "`pip install 'line-task>=1.0'`" in error.fix
    assert "Ask the organiser" in refused(Code.TASK_NOT_INSTALLED, "no package 'line_task'").fix


@pytest.mark.parametrize(
    "name", ["a.b", "a:", ":b", "a.b.c", "a b:C", "a:b:c", "a:B.c", "a-b:C", "ä:B", "..:x", "a;b:C", ""]
)
def test_a_name_of_another_form_is_refused_with_the_form(name: str) -> None:
    error = refused(Code.UNKNOWN_TASK, repr(name), name=name)
    assert not {".", ":"} & set(name) or "package.module:Class" in error.fix


@pytest.mark.parametrize(
    "package",
    [
        "a; rm -rf ~",
        "--index-url x",
        "-r x",
        "a b",
        "git+https://x",
        "a @ https://x",
        "a>",
        "$(x)",
        "a`x`",
        "a\n",
        "../a",
        "ä",
    ],
)
def test_what_to_install_cannot_be_another_command(package: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"name": "a", "task": {"package": package}}, "here")
    assert caught.value.code is Code.BAD_VALUE
    assert "my-task>=1.0" in caught.value.message


@pytest.mark.parametrize("package", ["", "a", "my-task", "my.task_2>=1.0,<2", "a==1.0.*", "a~=1.4.2", "a!=1.0+local"])
def test_what_to_install_may_have_versions(package: str) -> None:
    assert parse_settings({"name": "a", "task": {"package": package}}, "here").task.package == package


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "x = 1\nimport no_such_thing",
            ["ModuleNotFoundError: No module named 'no_such_thing'", "line_task.py, line 2"],
        ),
        ("def f():\n    return 1 / 0\n\nf()", ["ZeroDivisionError: division by zero", "line_task.py, line 2"]),
        ("x = = 1", ["SyntaxError: invalid syntax", "line_task.py, line 1"]),
        ("raise SystemExit(3)", ["SystemExit: 3", "line_task.py, line 1"]),
        ("class Lime: ...", ["line_task has no class 'Line'", "did you mean 'Lime'?"]),
        ("Line = 3", ["Line is not a class"]),
        (
            "class Line:\n    def __init__(self, *, seed, options): ...",
            ["lacks floor, build_model, blocks, samples, loss"],
        ),
        (GOOD.replace("def loss(", "def lost("), ["it lacks loss."]),
        (GOOD.replace("    Options = Options", "    Options = 3"), ["Options are not a class made of"]),
    ],
)
def test_a_package_that_is_no_task_is_refused_in_words(install: Install, source: str, words: list[str]) -> None:
    install(source)
    refused(Code.BAD_TASK, "line_task:Line", *words)


def test_empty_methods_inherited_from_the_protocol_do_not_count(install: Install) -> None:
    source = GOOD.replace("class Line:", "from collab_trainer import Task\nclass Line(Task):")
    install(source.replace("def evaluate(", "def evaluates("))
    refused(Code.BAD_TASK, "it lacks evaluate.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, ["width = 0", "whole number from 1 to 9"]),
        ({"noise": -1.0}, ["noise = -1.0", "not allowed"]),
        ({"noise": "loud"}, ["noise = 'loud'", "it must be a number"]),
        ({"kind": "square"}, ["kind = 'square'", "'flat' or 'round'"]),
        ({"is_slow": 1}, ["is_slow = 1", "true or false"]),
        ({"widht": 2}, ["no option 'widht'", "Did you mean 'width'?"]),
        ({"width": 9, "is_slow": True}, ["width = 9 is never slow"]),
    ],
)
def test_its_options_are_checked_in_the_same_words(install: Install, options: dict[str, Any], words: list[str]) -> None:
    install(GOOD)
    refused(Code.BAD_TASK_OPTION, *words, **options)


def test_an_option_without_a_default_is_asked_for(install: Install) -> None:
    install(GOOD.replace("is_slow: bool = False", "is_slow: bool"))
    refused(Code.BAD_TASK_OPTION, "is_slow")


def test_a_task_without_options_takes_none(install: Install) -> None:
    install(GOOD.replace("    Options = Options", "").replace("self.options.width", "3"))
    load()
    refused(Code.BAD_TASK_OPTION, "no option 'width'", width=2)


def failing(method: str, body: str) -> str:
    """The good task with another body of one method."""
    head, _, rest = GOOD.partition(f"    def {method}(")
    signature, _, below = rest.partition(":\n")
    _, _, after = below.partition("\n\n")
    return f"{head}    def {method}({signature}:\n        {body}\n\n{after}"


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        ("build_model", "return torch.nn.Linear(-1, 1)", ["RuntimeError"]),
        ("build_model", "return None", ["returned a NoneType, not a Module"]),
        ("blocks", "raise KeyError('next')", ["KeyError: 'next'"]),
        ("blocks", "return iter([])", ["the data came to an end"]),
        ("samples", "return block.nothing", ["AttributeError", "nothing"]),
        ("samples", "return torch.zeros(3)", ["returned a Tensor, not a dict"]),
        (
            "samples",
            "return {'x': torch.zeros(3), 'y': torch.zeros(2)}",
            ["'x' has 3", "'y' has 2", "same number of rows"],
        ),
        ("samples", "return {'x': torch.tensor(3)}", ["'x' is a single number"]),
        ("samples", "return {'x': [1]}", ["'x' is a list, not a tensor"]),
        ("samples", "return {}", ["it is empty"]),
        ("loss", "return model(batch['y']).mean()", ["KeyError: 'y'"]),
        ("loss", "return model(batch['x'][:, 1:]).mean()", ["RuntimeError", "shapes cannot be multiplied"]),
        ("loss", "return model(batch['x'])", ["shape (4, 1)", ".mean()"]),
        ("loss", "return batch['x'].mean()", ["does not depend on the model's parameters"]),
        ("loss", "return 1.0", ["returned a float, not a Tensor"]),
        ("evaluate", "return 'low'", ["ValueError", "low"]),
        ("sample", "return b'x'", ["returned a bytes, not a str"]),
        ("__init__", "raise FileNotFoundError('pictures.zip')", ["FileNotFoundError: pictures.zip"]),
    ],
)
def test_a_method_that_fails_is_named_with_the_error_and_the_line(
    install: Install, method: str, body: str, words: list[str]
) -> None:
    def use_all_of_it() -> None:
        task = load()
        model = task.build_model()
        blocks = task.blocks(seed=1, position=None)
        task.loss(model, task.samples(next(blocks))).backward()
        task.evaluate(model)
        task.sample(model)

    source = failing(method, body)
    install(source)
    with pytest.raises(TaskError) as caught:
        use_all_of_it()
    error = caught.value
    assert error.code is Code.TASK_FAILED
    assert f"{method}() of the task line_task:Line failed: " in error.message
    for word in words:
        assert word in error.message, error.message
    if not body.startswith("return") or "nothing" in body or "model(batch['y'])" in body:
        line = next(number for number, text in enumerate(source.splitlines(), 1) if body in text)
        assert f"(line_task.py, line {line})" in error.message
    assert error.__cause__ is not None


@pytest.mark.parametrize("is_regular", [True, False])
def test_the_line_is_found_in_packages_of_both_kinds(install: Install, tmp_path: Path, is_regular: bool) -> None:
    install("", module="unused", registers="deep_task.inner.lines:Line")
    folder = tmp_path / "deep_task" / "inner"
    folder.mkdir(parents=True)
    (folder / "lines.py").write_text(failing("sample", "return 1 / 0"))
    if is_regular:
        (tmp_path / "deep_task" / "__init__.py").touch()
        (folder / "__init__.py").touch()
    task = load("deep_task.inner.lines:Line")
    with pytest.raises(TaskError, match=r"ZeroDivisionError: division by zero \(deep_task/inner/lines.py, line \d+\)"):
        task.sample(task.build_model())


def test_a_position_that_json_cannot_keep_is_the_tasks_mistake(install: Install) -> None:
    install(GOOD.replace("return NumberedBlocks(seed, position)", "return Stream()") + POSITION)
    blocks = load().blocks(seed=1, position=None)
    next(blocks)
    with pytest.raises(TaskError, match=r"position of blocks.*not JSON serializable") as caught:
        blocks.position  # noqa: B018
    assert caught.value.code is Code.TASK_FAILED


POSITION = """
class Stream:
    position = {"at": {1, 2}}
    def __next__(self):
        return None
"""


def test_a_failure_in_a_data_worker_reaches_the_trainer(install: Install, tmp_path: Path) -> None:
    install(failing("samples", "raise OSError('the disk is gone')"))
    events = EventLog(tmp_path / "events.jsonl")
    journal = DataJournal(tmp_path / "data.json", "run", events)
    batches = Batches(load(), journal, batch_size=8, num_workers=2)
    try:
        with pytest.raises(
            TaskError, match=r"samples\(\) of the task line_task:Line failed: OSError: the disk is gone"
        ):
            next(batches)
    finally:
        batches.close()
        events.close()
    assert threading.active_count() < 50


def test_a_batch_that_is_too_large_for_the_gpu_is_not_the_tasks_mistake(install: Install) -> None:
    install(failing("loss", "raise torch.cuda.OutOfMemoryError('out of memory')"))
    task = load()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        task.loss(task.build_model(), {})
