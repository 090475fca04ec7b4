"""What `[task.options]` of causal-lm may say."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from collab_core.run.settings import Section

COMMIT = re.compile(r"[0-9a-f]{40}")
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
FORMATS = {".txt": "text", ".md": "text", ".text": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class ModelOptions(Section):
    """Where the model comes from: a config, a Hub repository, or a folder. One of the three."""

    config: dict[str, Any] = Field(default_factory=dict)
    """Config of a `transformers` causal model: `model_type` and what differs from its defaults."""
    repo: str = ""
    """Repository on the Hub, `owner/name`."""
    revision: str = ""
    """Commit of the repository: 40 hex digits, so that it cannot change."""
    path: str = ""
    """Folder with config.json and safetensors, relative to the run file; `collab publish-model` makes one."""
    root: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Root of the weights; `collab publish-model` writes it, and whoever signs the run compares."""

    @model_validator(mode="after")
    def _one_place(self) -> ModelOptions:
        given = [name for name in ("config", "repo", "path") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"a model comes from exactly one of config, repo and path, not from {given or 'none'}")
        if self.root and self.config:
            raise ValueError("root is the root of published weights, but the model is made from a config")
        check_repo(self.repo, self.revision, "models")
        return self


class TokenizerOptions(Section):
    """How text becomes tokens. Nothing given: the model's own tokenizer, or bytes if it has none."""

    kind: Literal["", "bytes"] = ""
    """`"bytes"`: every byte is a token, and one more ends a document: 257."""
    repo: str = ""
    """Repository on the Hub with a tokenizer.json."""
    revision: str = ""
    """Commit of the repository: 40 hex digits."""
    file: str = ""
    """A tokenizer.json, relative to the run file."""
    end_of_document: str = ""
    """The token that ends a document, if the tokenizer's files do not say."""

    @model_validator(mode="after")
    def _one_place(self) -> TokenizerOptions:
        given = [name for name in ("kind", "repo", "file") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"a tokenizer comes from one place, not from {' and '.join(given)}")
        if self.end_of_document and self.kind:
            raise ValueError("bytes have an end of document of their own: leave end_of_document out")
        check_repo(self.repo, self.revision, "models")
        return self


class DataOptions(Section):
    """One source of text: local files that every peer brings, or a data set on the Hub that is streamed."""

    files: Annotated[list[str], Field(max_length=1000)] = Field(default_factory=list)
    """Names or patterns of local files (`data/*.txt`), relative to `--data-dir`; by default the run's folder."""
    format: Literal["", "text", "json", "parquet"] = ""
    """What the files are; by default from their names: .txt and .md are text, .jsonl and .json, .parquet."""
    documents: Literal["paragraph", "line", "file"] = "paragraph"
    """What is one document in a text file. Paragraphs are separated by empty lines."""
    repo: str = ""
    """Data set on the Hub, `owner/name`."""
    revision: str = ""
    """Commit of the data set: 40 hex digits."""
    name: str = ""
    """Configuration of the data set, if it has several."""
    split: str = "train"
    """Split of the data set."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """Column with the text; not for text files."""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """How much is read from this source, relative to the others."""

    @model_validator(mode="after")
    def _one_place(self) -> DataOptions:
        if bool(self.files) == bool(self.repo):
            raise ValueError("a source of data has either files or a repo")
        if self.name and not self.repo:
            raise ValueError("name is for a data set on the Hub")
        check_repo(self.repo, self.revision, "datasets")
        for pattern in self.files:
            check_pattern(pattern)
        if self.files:
            self.file_format()
        return self

    def file_format(self) -> str:
        """The format of the files, from the option or from their names."""
        formats = {FORMATS.get(PurePosixPath(pattern).suffix.lower(), "") for pattern in self.files}
        if self.format:
            return self.format
        if len(formats) == 1 and formats != {""}:
            return formats.pop()
        raise ValueError(f'say what the files {self.files} are: format = "text", "json" or "parquet"')


class EvaluationOptions(Section):
    """Held-out text: never trained on. By default a share of the data, chosen by the document's own hash."""

    one_in: Annotated[int, Field(ge=2, le=1_000_000)] = 64
    """One document in so many is held out; not with `data`."""
    num_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    """How many sequences the loss is measured on."""
    data: Annotated[list[DataOptions], Field(max_length=16)] = Field(default_factory=list)
    """Sources of their own for evaluation; then nothing of the training data is held out."""


class CausalLMOptions(Section):
    """`[task.options]` of causal-lm."""

    sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 256
    """Tokens the model sees at once. Documents are packed: one after the other, cut at this length."""
    gradient_checkpointing: bool = False
    """Less memory for a third more computation."""
    model: ModelOptions
    tokenizer: TokenizerOptions = Field(default_factory=TokenizerOptions)
    data: Annotated[list[DataOptions], Field(min_length=1, max_length=64)]
    """Sources of text, `[[task.options.data]]`; several are mixed by their weights."""
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)


def check_repo(repo: str, revision: str, kind: Literal["models", "datasets"]) -> None:
    """A repository is named properly and pinned to a commit.

    Raises:
        ValueError: it is not; the message says how to pin it.
    """
    if not repo:
        if revision:
            raise ValueError("revision is for a repo")
        return
    if not REPO.fullmatch(repo) or ".." in repo or (kind == "datasets" and "/" not in repo):
        raise ValueError(f"repo = {repo[:100]!r} is not the name of a repository, such as 'owner/name'")
    if not COMMIT.fullmatch(revision):
        seen = f"revision = {revision[:60]!r} can move" if revision else "revision is missing"
        prefix = "datasets/" if kind == "datasets" else ""
        raise ValueError(
            f"{seen}; pin the commit that is meant, 40 hex digits. The page /{prefix}{repo}/commits/main of the Hub "
            "shows it, and so does `git ls-remote`"
        )


def check_pattern(pattern: str) -> None:
    """Files stay below the folder that a volunteer gave: a stranger wrote the pattern.

    Raises:
        ValueError: it leads elsewhere.
    """
    path = PurePosixPath(pattern)
    if not pattern or path.is_absolute() or ".." in path.parts or "\\" in pattern or "\0" in pattern:
        raise ValueError(
            f"{pattern[:100]!r} must be the name of a file below the data folder, without '..'; "
            "everyone says with --data-dir where that folder is"
        )
