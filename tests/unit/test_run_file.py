"""The run file: what is accepted, and that every mistake is answered in words."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collab_core.errors import Code, ConfigError
from collab_core.run import RunSettings, load_run_file, parse_settings, run_template
from collab_core.run.problems import NAME_RULE
from collab_core.run.runfile import MAX_RUN_FILE_BYTES
from collab_core.run.settings import Section

MINIMAL = 'name = "my-run"\n'
NOBODY = 65534


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def refusal(folder: Path, text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run_file(write(folder, text))
    error = caught.value
    assert error.fix
    assert error.exit_code == 2
    leaked = ["pydantic", "Input should", "validation", "_type", "Settings", "ctx", "Traceback"]
    assert not [word for word in leaked if word in str(error)]
    return error


def test_a_name_is_enough_for_a_run(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, MINIMAL)) == RunSettings(name="my-run")


def test_the_folder_stands_for_its_run_file(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    assert load_run_file(tmp_path) == load_run_file(tmp_path / "run.toml")


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    file = write(tmp_path, b"\xef\xbb\xbf" + b'name = "my-run"\r\n[optimizer]\r\nlr = 0.1\r\n')
    assert load_run_file(file).optimizer.lr == 0.1


def test_a_whole_number_is_accepted_where_a_fraction_may_stand(tmp_path: Path) -> None:
    lr = load_run_file(write(tmp_path, MINIMAL + "[optimizer]\nlr = 1\n")).optimizer.lr
    assert lr == 1.0
    assert type(lr) is float


@pytest.mark.parametrize(
    "options", ["a = 1", "a = 1.5", 'a = "x"', "a = true", 'a = [1, "x", 2.5, false]', "a = []", ""]
)
def test_plain_task_options_are_kept_as_they_are(tmp_path: Path, options: str) -> None:
    text = MINIMAL + f"[task.options]\n{options}\n"
    assert dotted_line(load_run_file(write(tmp_path, text)).task.options) == options


def test_tables_and_lists_of_tables_are_kept_as_they_are(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "[task.options.model]\nconfig = {a = [1, 2.0]}\n[[task.options.data]]\nx = true\n[[task.options.data]]\n"
    )
    options = load_run_file(write(tmp_path, text)).task.options
    assert repr(options) == repr({"model": {"config": {"a": [1, 2.0]}}, "data": [{"x": True}, {}]})


def dotted_line(options: dict[str, object]) -> str:
    words = {"True": "true", "False": "false"}
    text = "".join(f"{key} = {value!r}" for key, value in options.items()).replace("'", '"')
    for python, toml in words.items():
        text = text.replace(python, toml)
    return text


def test_a_missing_run_file_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "run.toml"):
        with pytest.raises(ConfigError) as caught:
            load_run_file(path)
        assert caught.value.code is Code.RUN_NOT_FOUND
        assert "collab new NAME" in caught.value.fix
        assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    "path",
    ["x" * 5000, "a\0b", "/dev/zero", "/dev/null/run.toml"],
    ids=["too long", "NUL", "without end", "not a folder"],
)
def test_a_path_that_cannot_be_a_run_file_is_refused_in_words(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(Path(path))
    assert caught.value.code is Code.RUN_NOT_FOUND


def test_a_file_without_permission_is_refused_in_words(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    write(short_folder, MINIMAL).chmod(0)
    with as_anybody(), pytest.raises(ConfigError, match="Permission denied"):
        load_run_file(short_folder)


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Root may read everything, so it is somebody else for a moment."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize(
    "data", ['name = "é"'.encode("latin-1"), MINIMAL.encode("utf-16"), b"#" * MAX_RUN_FILE_BYTES + b"#"]
)
def test_bytes_that_are_not_utf8_or_too_many_are_refused(tmp_path: Path, data: bytes) -> None:
    error = refusal(tmp_path, data)
    assert error.code is Code.RUN_NOT_FOUND
    assert "UTF-8" in error.fix


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('name = "my-run"\n[optimizer]\nlr 0.1\n', "line 3, column 4"),
        ("name = my-run\n", "line 1, column 8"),
        ('name = "my-run', "at end of document"),
        ('name = "a"\nname = "b"\n', "line 2"),
        ("a = " + "[" * 20_000, "nested"),
        ("a = " + "9" * 5000, "digits"),
    ],
)
def test_text_that_is_not_toml_is_refused_with_its_place(tmp_path: Path, text: str, where: str) -> None:
    error = refusal(tmp_path, text)
    assert error.code is Code.RUN_NOT_TOML
    assert where in error.message


@pytest.mark.parametrize(
    ("text", "key", "guess"),
    [
        ("[optimizer]\nlearning_rate = 0.1", "optimizer.learning_rate = 0.1", None),
        ("[optimizer]\nwarmup_epoch = 3", "optimizer.warmup_epoch = 3", "optimizer.warmup_epochs"),
        ("[optimiser]\nlr = 0.1", "optimiser = {…}", "optimizer"),
        ("[strategy]\nCodec = 'none'", "strategy.Codec = 'none'", "strategy.codec"),
        ("lr = 0.1", "lr = 0.1", "optimizer.lr"),
        ("[task.option]\nx = 1", "task.option = {…}", "task.options"),
        ('"a b" = 1', '"a b" = 1', None),
        ('"\\u001b[2J" = "\\u001b[2J"', "\"\\u001b[2J\" = '\\x1b[2J'", None),
    ],
)
def test_an_unknown_key_is_named_with_what_is_allowed(tmp_path: Path, text: str, key: str, guess: str | None) -> None:
    error = refusal(tmp_path, MINIMAL + text)
    assert error.code is Code.UNKNOWN_KEY
    assert key in error.message
    assert "may have: name, " in error.message
    assert ("did you mean" in error.message) == (guess is not None)
    if guess:
        assert f"did you mean {guess}?" in error.message
        assert guess in error.fix
    assert "\x1b" not in str(error)


def test_a_mistyped_name_is_reported_before_the_missing_one(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'nam = "my-run"')
    assert error.code is Code.UNKNOWN_KEY
    assert "did you mean name?" in error.message
    assert "(and 1 more)" in error.message


BAD_VALUES = [
    ("[optimizer]\nlr = 0", "optimizer.lr = 0", "greater than 0"),
    ("[optimizer]\nlr = -1.5", "optimizer.lr = -1.5", "greater than 0"),
    ("[optimizer]\nlr = inf", "optimizer.lr = inf", "a finite number"),
    ("[optimizer]\nlr = nan", "optimizer.lr = nan", "a finite number"),
    ("[optimizer]\nweight_decay = nan", "optimizer.weight_decay = nan", "a finite number"),
    ("[strategy]\nmatchmaking_time_s = nan", "strategy.matchmaking_time_s = nan", "a finite number"),
    ("[optimizer]\nlr = 'fast'", "optimizer.lr = 'fast'", "a number, not text"),
    ("[optimizer]\nlr = true", "optimizer.lr = true", "a number, not true or false"),
    ("[optimizer]\nlr = [0.1]", "optimizer.lr = [0.1]", "a number, not a list"),
    ("[optimizer]\nbeta1 = 1", "optimizer.beta1 = 1", "less than 1"),
    ("[optimizer]\nweight_decay = 1.5", "optimizer.weight_decay = 1.5", "1 or less"),
    ("[strategy]\naveraging_timeout_s = 0.5", "strategy.averaging_timeout_s = 0.5", "1 or more"),
    ("[strategy]\ntarget_batch_size = 0", "strategy.target_batch_size = 0", "1 or more"),
    ("[strategy]\ntarget_batch_size = 2.0", "strategy.target_batch_size = 2.0", "a whole number, not a number with"),
    ("[strategy]\ntarget_batch_size = '256'", "strategy.target_batch_size = '256'", "a whole number, not text"),
    ("[strategy]\ntarget_batch_size = true", "strategy.target_batch_size = true", "a whole number, not true or false"),
    ("[strategy]\ntarget_batch_size = 1979-05-27", "strategy.target_batch_size = 1979-05-27", "not a date"),
    ("[strategy]\ncodec = 'FP16'", "strategy.codec = 'FP16'", "'int8', 'int4' or 'topk' (did you mean 'fp16'?)"),
    ("[strategy]\ncodec = 'zstd'", "strategy.codec = 'zstd'", "'none', 'fp16', 'int8', 'int4' or 'topk'."),
    ("[strategy]\ncodec = 16", "strategy.codec = 16", "'none', 'fp16', 'int8', 'int4' or 'topk'."),
    ("[optimizer]\nname = 'adam'", "optimizer.name = 'adam'", "'sgd' or 'adamw8bit' (did you mean 'adamw'?)"),
    ("[strategy]\nname = 'all-reduce'", "strategy.name = 'all-reduce'", "(did you mean 'allreduce'?)"),
    ("strategy = 'allreduce'", "strategy = 'allreduce'", "a table [strategy], not text"),
    ("[task]\noptions = 3", "task.options = 3", "a table [task.options], not a whole number"),
    ("[task]\nname = 3", "task.name = 3", "text in quotes, not a whole number"),
    ("[task]\nseed = 9223372036854775808", "task.seed = 9223372036854775808", "less than 9223372036854775808"),
    ("description = '" + "x" * 501 + "'", "description = 'xxx", "501 characters, and at most 500"),
    ("[task.options]\nwhen = 1979-05-27T07:32:00Z", "task.options.when = 1979-05-27T07:32", "not a date and time"),
    ("[task.options]\nwhen = 1979-05-27", "task.options.when = 1979-05-27", "not a date"),
    ("[task.options]\nwhen = 07:32:00", "task.options.when = 07:32:00", "not a time"),
    ("[task.options.model]\nmade = 1979-05-27", "task.options.model.made = 1979-05-27", "not a date"),
    ("[task.options]\na = [[1], [07:32:00]]", "task.options.a.1.0 = 07:32:00", "not a time"),
    ("[[task.options.data]]\n[[task.options.data]]\nb = [nan]", "task.options.data.1.b.0 = nan", "a finite number"),
    ("[task.options]\na = [[[[[[[[1]]]]]]]]", "task.options.a.0.0.0.0.0.0.0.0 = 1", "more than 8 deep"),
    ("[task.options]\na = inf", "task.options.a = inf", "a finite number"),
    ("[task.options]\na = 9223372036854775808", "task.options.a = 9223372036854775808", "64 bits"),
]


@pytest.mark.parametrize(("text", "key", "reason"), BAD_VALUES)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, text: str, key: str, reason: str) -> None:
    error = refusal(tmp_path, MINIMAL + text)
    assert error.code is Code.BAD_VALUE
    assert f"run.toml: {key}" in error.message
    assert reason in error.message
    assert "more)" not in error.message


def test_the_fix_names_the_default(tmp_path: Path) -> None:
    assert "The default is 0.01." in refusal(tmp_path, MINIMAL + "[optimizer]\nlr = 0").fix


@pytest.mark.parametrize("name", ["", "My-Run", "-run", "my run", "a/b", "..", "é", "x" * 49, "run\\n"])
def test_a_name_that_could_not_be_a_folder_everywhere_is_refused(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path, f'name = "{name}"')
    assert error.code is Code.BAD_VALUE
    assert NAME_RULE in error.message


def test_a_run_without_a_name_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "")
    assert error.code is Code.BAD_VALUE
    assert "name is missing" in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("decay = 'cosine'", "optimizer.decay = 'cosine' needs optimizer.decay_epochs > 0"),
        ("decay_epochs = 5", "optimizer.decay_epochs is set"),
        ("momentum = 0.5", "optimizer.momentum is only for 'sgd'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, text: str, words: str) -> None:
    error = refusal(tmp_path, MINIMAL + "[optimizer]\n" + text)
    assert error.code is Code.BAD_COMBINATION
    assert words in error.message
    assert "Value error" not in error.message


def test_only_the_first_problem_is_told_and_the_others_are_counted(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL + "[optimizer]\nlr = 0\neps = 0\n[task.options]\na = 1979-05-27\n")
    assert "optimizer.lr = 0" in error.message
    assert "eps" not in error.message
    assert "(and 2 more)" in error.message


@pytest.mark.parametrize(
    "data",
    [
        {},
        {3: 1},
        {"name": "\ud800"},
        {"\ud800": 1},
        {"name": None},
        {"name": "a", "optimizer": {"\ud800": 1}},
        {"name": "a", "strategy": {"codec": "\ud800"}},
        {"name": "a", "task": {"options": {"\ud800": 1}}},
        {"name": "a", "task": {"options": {3: 1}}},
        {"name": "a", "task": {"options": {"a": None}}},
        {"name": "a", "task": {"options": {"a": {"b": [None]}}}},
        {"name": "a", "task": {"options": {"a": {"\ud800": 1}}}},
        {"name": "a", "task": {"options": {"a": {3: 1}}}},
    ],
)
def test_data_no_run_file_could_hold_is_refused_in_words(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(data, "the manifest")
    str(caught.value).encode()


def test_the_template_holds_every_key_with_its_default(tmp_path: Path) -> None:
    settings = load_run_file(write(tmp_path, run_template("my-run")))
    options = settings.task.options
    assert options == {"corpus_seed": 0, "layers": 2, "heads": 4, "width": 64, "sequence_length": 128}
    plain = settings.model_copy(update={"task": settings.task.model_copy(update={"options": {}})})
    assert plain == RunSettings(name="my-run")
    assert_every_key_is_set(settings)


def assert_every_key_is_set(section: Section) -> None:
    assert section.model_fields_set == set(type(section).model_fields)
    for name in type(section).model_fields:
        if isinstance(value := getattr(section, name), Section):
            assert_every_key_is_set(value)


@pytest.mark.parametrize(
    ("name", "better"),
    [("My Run!", "my-run"), ('a"\nx = 1', "a-x-1"), ("", "my-run"), ("é", "my-run"), ("{name}", "name")],
)
def test_a_bad_name_for_a_new_run_is_answered_with_a_better_one(name: str, better: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_template(name)
    assert caught.value.code is Code.BAD_OPTION
    assert f"`collab new {better}`" in caught.value.fix


def test_the_package_loads_no_heavy_library() -> None:
    code = "import sys, collab_core.run; print([m for m in ('torch', 'hivemind', 'numpy') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
