"""The initial model of a run as others find it: weights, config, tokenizer and a card, in one commit or one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from collab_core.errors import Code, StateError, TaskError
from collab_core.hub import hub_in_words
from collab_core.run.pinning import new_folder
from collab_core.run.settings import RunSettings
from collab_trainer.causal_lm.card import model_card
from collab_trainer.causal_lm.files import MODEL_FILES, TOKENIZER_FILES
from collab_trainer.causal_lm.model import model_root
from collab_trainer.causal_lm.task import CausalLM

READ_FILES = (*MODEL_FILES, *TOKENIZER_FILES, "model.safetensors.index.json")
ONE_FILE = "1000GB"  # the Hub takes files of any size; one is easier to check than many


@dataclass(frozen=True, slots=True)
class Published:
    """Where the model is now."""

    pins: dict[str, str]
    """What to write into `[task.options.model]`."""
    place: str
    """For people."""


def publish_to_hub(task: CausalLM, settings: RunSettings, repo: str) -> Published:
    """Upload the initial model in one commit to a repository that is there.

    Files of an earlier model that readers would take for parts of this one go in the same commit.

    Raises:
        HubError: in words.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    with tempfile.TemporaryDirectory(prefix="collab-publish-") as name:
        folder = Path(name)
        root = _write(task, settings, folder, repo)
        with hub_in_words(repo):
            api = HfApi()
            added = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
            stale = set(api.list_repo_files(repo)) & set(READ_FILES) - {file.name for file in folder.iterdir()}
            commit = api.create_commit(
                repo,
                [*added, *(CommitOperationDelete(name) for name in sorted(stale))],
                commit_message=f"The initial model of the Collab run {settings.name}",
            )
    return Published({"repo": repo, "revision": commit.oid, "root": root}, f"{repo} at {commit.oid}")


def publish_to_folder(task: CausalLM, settings: RunSettings, target: Path, run_dir: Path) -> Published:
    """Write the initial model into a new folder, whole or not at all.

    Raises:
        ConfigError: BAD_OPTION, there is something already.
        StateError: STATE_DIR_UNWRITABLE.
    """
    target = new_folder(target)
    with _beside(target) as folder:
        root = _write(task, settings, folder, ".")
        if target.is_dir():
            target.rmdir()
        folder.rename(target)
    path = os.path.relpath(target.resolve(), run_dir.resolve())  # a link to the run is not where `..` begins
    return Published({"path": path, "root": root}, str(target))


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder to write in; gone afterwards unless it was moved."""
    beside = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        beside.mkdir(parents=True)
        yield beside
    except OSError as error:
        raise StateError(
            Code.STATE_DIR_UNWRITABLE,
            f"The model cannot be written to {str(target)!r}: {error.strerror or error}.",
            fix="Choose a folder you may write to, on a disk with space left.",
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(task: CausalLM, settings: RunSettings, folder: Path, place: str) -> str:
    """Everything a reader needs; returns the root of the weights."""
    model = task.build_model()
    root = model_root(model)
    model.save_pretrained(folder, max_shard_size=ONE_FILE)  # type: ignore[operator]
    if not (folder / "model.safetensors").is_file():
        raise TaskError(
            Code.BAD_MODEL,
            "transformers wrote no model.safetensors.",
            fix="Install a newer transformers and safetensors.",
        )
    tokenizer = {name: data for name, data in task.context.assets.items() if name in TOKENIZER_FILES}
    for name, data in tokenizer.items():
        (folder / name).write_bytes(data)
    card = model_card(
        settings,
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        sequence_length=task.options.sequence_length,
        tokenizer=f"{task.tokenizer.num_tokens:,} tokens" if tokenizer else "bytes: 256, and 256 ends a document",
        root=root,
        place=place,
    )
    (folder / "README.md").write_text(card)
    for file in folder.iterdir():  # safetensors makes files that only their owner may read
        shutil.copymode(folder / "README.md", file)
    return root
