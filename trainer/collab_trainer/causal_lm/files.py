"""The files behind a model and a tokenizer: in a folder, or in a repository on the Hub. The organiser's side only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from collab_core.errors import Code, TaskError
from collab_core.hub import download_file, download_folder
from collab_core.run.assets import MAX_ASSET_BYTES
from collab_trainer.causal_lm.model import WEIGHTS
from collab_trainer.causal_lm.options import CausalLMOptions, ModelOptions
from collab_trainer.causal_lm.tokenizer import CONFIG, TOKENIZER, TOKENIZER_CONFIG

MODEL_FILES = (CONFIG, "generation_config.json")
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json")


def collect_files(options: CausalLMOptions, run_dir: Path) -> dict[str, bytes]:
    """What every peer needs to build the model and to read text: config and tokenizer, by file name.

    Raises:
        TaskError: a file is missing or too large.
        HubError: the Hub does not give one.
    """
    model, tokenizer = options.model, options.tokenizer
    files: dict[str, bytes] = {}
    if not model.config:
        files |= _from(model.repo, model.revision, run_dir / model.path, MODEL_FILES, required={CONFIG})
    if tokenizer.repo:
        files |= _from(tokenizer.repo, tokenizer.revision, run_dir, TOKENIZER_FILES, required={TOKENIZER})
    elif tokenizer.file:
        path = run_dir / tokenizer.file
        files |= _in_folder(path.parent, TOKENIZER_FILES[1:])
        files[TOKENIZER] = _read(path, Code.BAD_TOKENIZER)
    elif not model.config and tokenizer.kind != "bytes":
        files |= _from(model.repo, model.revision, run_dir / model.path, TOKENIZER_FILES, required=set())
    return files


def find_weights(options: ModelOptions, run_dir: Path) -> Path:
    """The folder with a model's weights; downloads them if they are on the Hub and not here yet."""
    if options.repo:
        return download_folder(options.repo, options.revision, [WEIGHTS, f"{WEIGHTS}.index.json"])
    return run_dir / options.path


def _from(repo: str, revision: str, folder: Path, names: Iterable[str], *, required: set[str]) -> dict[str, bytes]:
    if not repo:
        found = _in_folder(folder, names)
        for name in required - found.keys():
            _read(folder / name)
        return found
    found = {}
    for name in names:
        path = download_file(repo, revision, name, is_required=name in required)
        if path is not None:
            found[name] = _read(path)
    return found


def _in_folder(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: _read(folder / name) for name in names if (folder / name).is_file()}


def _read(path: Path, code: Code = Code.BAD_MODEL) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_ASSET_BYTES + 1)  # one more than allowed: whoever signs refuses it, with the size
    except OSError as error:
        raise TaskError(
            code,
            f"The file {str(path)!r} of the run's model cannot be read: {error.strerror or error}.",
            fix="Paths in run.toml are relative to its folder: put the file there, or change [task.options].",
        ) from None
