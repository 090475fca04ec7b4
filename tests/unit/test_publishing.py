"""Publishing the initial model: whole or not at all, pinned in a run file that otherwise stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm import LLAMA, task, word_tokenizer

from collab_core.errors import Code, ConfigError, StateError, TaskError
from collab_core.run import RunFolder, run_template
from collab_core.run.pinning import pin_model
from collab_core.run.settings import RunSettings, TaskSettings
from collab_core.templates import Template
from collab_trainer import TaskContext, collect_assets, load_task, prepare
from collab_trainer.causal_lm.model import model_root
from collab_trainer.causal_lm.publish import publish_to_folder

RUN = RunSettings(name="my-run", description="Foxes & birds.")
ROOT = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", run_template("my-run", Template.CAUSAL_LM))


def test_a_published_folder_gives_the_same_model_and_the_same_initial_state(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    made = task()
    published = publish_to_folder(made, RUN, tmp_path / "model", run_dir)
    assert published.pins == {"path": "../model", "root": model_root(made.build_model())}
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["run", "model"] or not list(tmp_path.glob(".*"))
    before = _with(made.options.model_dump())
    after = _with({**made.options.model_dump(), "model": published.pins})
    one, two = prepare(before, run_dir), prepare(after, run_dir)
    assert one.initial_root == two.initial_root
    assert two.assets.keys() == {"config.json", "generation_config.json"}


def _with(options: dict[str, Any]) -> RunSettings:
    return RUN.model_copy(update={"task": TaskSettings(name="causal-lm", options=options)})


def test_a_volunteer_builds_the_model_from_the_runs_files_alone(tmp_path: Path) -> None:
    published = publish_to_folder(task(), RUN, tmp_path / "model", tmp_path)
    settings = _with({**task().options.model_dump(), "model": published.pins}).task
    assets = collect_assets(settings, tmp_path)
    volunteer = load_task(settings, TaskContext(assets=assets)).build_model()
    organiser = load_task(settings, TaskContext(assets=assets, run_dir=tmp_path)).build_model()
    assert {name: tensor.shape for name, tensor in volunteer.state_dict().items()} == {
        name: tensor.shape for name, tensor in organiser.state_dict().items()
    }
    assert model_root(organiser) == published.pins["root"] != model_root(volunteer)


def test_tied_weights_and_the_tokenizer_survive(tmp_path: Path) -> None:
    made = task(
        context={"assets": {"tokenizer.json": word_tokenizer(), "tokenizer_config.json": b'{"eos_token": "<end>"}'}},
        tokenizer={"file": "tokenizer.json"},
        model={"config": {**LLAMA, "tie_word_embeddings": True}},
    )
    published = publish_to_folder(made, RUN, tmp_path / "model", tmp_path)
    settings = _with({**made.options.model_dump(), "tokenizer": {}, "model": published.pins}).task
    assets = collect_assets(settings, tmp_path)
    assert assets["tokenizer.json"] == word_tokenizer()
    again = load_task(settings, TaskContext(assets=assets, run_dir=tmp_path))
    assert again.tokenizer.end_of_document == 1  # type: ignore[attr-defined]
    assert model_root(again.build_model()) == published.pins["root"]


def test_the_card_says_what_it_is_and_how_to_join(tmp_path: Path) -> None:
    published = publish_to_folder(task(), RUN, tmp_path / "model", tmp_path)
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for words in ("# my-run", "Foxes & birds.", "LlamaForCausalLM", "collab train", published.pins["root"]):
        assert words in card
    num_parameters = sum(parameter.numel() for parameter in task().build_model().parameters())
    assert f"{num_parameters:,}" in card


def test_changed_weights_are_noticed_by_whoever_signs(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = publish_to_folder(task(), RUN, tmp_path / "model", tmp_path)
    settings = _with({**task().options.model_dump(), "model": published.pins})
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first] + torch.finfo(torch.float32).eps}, file, metadata={"format": "pt"})
    with pytest.raises(TaskError, match="and the run file pins") as caught:
        prepare(settings, tmp_path)
    assert caught.value.code is Code.BAD_MODEL
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file, metadata={"format": "pt"})
    with pytest.raises(TaskError, match=f"lack {first}"):
        prepare(settings, tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(TaskError) as caught:
        prepare(settings, tmp_path)
    assert caught.value.code is Code.BAD_MODEL
    file.unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"code")
    with pytest.raises(TaskError, match=r"has no model\*\.safetensors"):
        prepare(settings, tmp_path)


def test_what_was_published_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    publish_to_folder(task(), RUN, tmp_path / "model", tmp_path)  # an empty folder may be used
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with pytest.raises(ConfigError, match="already exists") as caught:
        publish_to_folder(task(), RUN, tmp_path / "model", tmp_path)
    assert caught.value.code is Code.BAD_OPTION
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError) as caught:
        publish_to_folder(task(), RUN, tmp_path / "file" / "model", tmp_path)
    assert caught.value.code is Code.STATE_DIR_UNWRITABLE
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- the run file ---


def test_pinning_keeps_comments_and_layout(folder: RunFolder) -> None:
    before = folder.run_file.read_text()
    pin_model(folder, {"repo": "ada/m", "revision": "cd" * 20, "root": ROOT})
    after = folder.run_file.read_text()
    options = folder.settings().task.options
    assert options["model"] == {"repo": "ada/m", "revision": "cd" * 20, "root": ROOT}
    removed = [line for line in before.splitlines() if line not in after.splitlines()]
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert all("=" in line or "task.options.model" in line for line in removed), removed
    assert len(added) == 4, added
    assert after.index("[task.options]") < after.index("[task.options.model]") < after.index("[strategy]")
    pin_model(folder, {"path": "../model", "root": ROOT})
    assert folder.settings().task.options["model"] == {"path": "../model", "root": ROOT}


@pytest.mark.parametrize(
    "model",
    [
        '[task.options.model]\nconfig = {model_type = "llama", hidden_size = 32}  # inline',
        '[task.options.model]\n# why\npath = "old"\nroot = ""\n',
        '[task.options]\nmodel.config.model_type = "llama"\nsequence_length = 64',
        '[task.options]\nmodel = {path = "old"}',
        '[task.options.model.config]\nmodel_type = "llama"\n[task.options.model.config.rope_parameters]\nx = 1.0',
    ],
)
def test_however_the_model_is_written_it_is_replaced(folder: RunFolder, model: str) -> None:
    text = f'name = "my-run"  # mine\n[task]\nname = "causal-lm"\n{model}\n[[task.options.data]]\nfiles = ["a.txt"]\n'
    folder.run_file.write_text(text)
    before = folder.settings().task.options
    pin_model(folder, {"path": "new", "root": ROOT})
    after = folder.settings().task.options
    assert after == {**before, "model": {"path": "new", "root": ROOT}}
    assert '"my-run"  # mine' in folder.run_file.read_text()
    assert not list(folder.path.glob(".*"))


def test_a_file_that_cannot_be_changed_safely_is_left_alone(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomlkit

    monkeypatch.setattr(tomlkit, "dumps", lambda _: 'name = "something-else"\n')
    before = folder.run_file.read_bytes()
    with pytest.raises(ConfigError) as caught:
        pin_model(folder, {"path": "new", "root": ROOT})
    assert caught.value.code is Code.CANNOT_PIN
    assert f'path = "new"\nroot = "{ROOT}"' in caught.value.fix
    assert folder.run_file.read_bytes() == before
