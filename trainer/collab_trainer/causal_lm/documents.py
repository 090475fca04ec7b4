"""Local documents through `datasets`: text, JSON lines or parquet files that a peer has on its disk."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from collab_core.errors import Code, TaskError
from collab_trainer.causal_lm.options import DataOptions

MAX_MATCHES = 100_000
MAX_RETRIES = 1
SAMPLE_BY = {"paragraph": "paragraph", "line": "line", "file": "document"}


def is_held_out(document: str, one_in: int) -> bool:
    """Whether a document belongs to evaluation. Decided by the document alone, so every peer agrees untold.

    Args:
        document: its text.
        one_in: the share that is held out; 0: none.
    """
    if one_in == 0:
        return False
    return int.from_bytes(blake3(document.encode(errors="replace")).digest(4), "little") % one_in == 0


def take(documents: Iterable[str], num_chars: int, one_in: int) -> tuple[list[str], int]:
    """Documents for training, about so many characters of them, and how many were gone through for it."""
    found: list[str] = []
    num_read = 0
    for document in documents:
        num_read += 1
        if document and not is_held_out(document, one_in):
            found.append(document)
            num_chars -= len(document)
        if num_chars <= 0:
            break
    return found, num_read


def find_files(source: DataOptions, data_dir: Path | None) -> list[Path]:
    """The files of a source, sorted.

    Raises:
        TaskError: NO_DATA, with the place that was searched and the flag that changes it.
    """
    patterns = ", ".join(source.files)
    if data_dir is None:
        raise TaskError(
            Code.NO_DATA,
            f"The run trains on files that everyone brings: {patterns}. You have not said where yours are.",
            fix="Give the folder below which they lie: --data-dir SOME/FOLDER",
        )
    found = set()
    for pattern in source.files:
        with contextlib.suppress(OSError, ValueError):  # not there, or not a pattern: told below
            for path in data_dir.glob(pattern):
                if path.is_file():
                    found.add(path)
                if len(found) > MAX_MATCHES:
                    raise _bad(f"{patterns} are more than {MAX_MATCHES} files")
    if not found:
        raise TaskError(
            Code.NO_DATA,
            f"No file matches {patterns} in {str(data_dir.absolute())!r}.",
            fix="Put the data there, or say where it is: --data-dir SOME/FOLDER",
        )
    return sorted(found)


class LocalDocuments:
    """Every document of a source, by number. They lie in Arrow files, so only what is asked for is in memory.

    Args:
        source: the run file's words.
        data_dir: the folder below which the files are.
        cache_dir: where the Arrow files go.
    """

    def __init__(self, source: DataOptions, data_dir: Path | None, cache_dir: Path) -> None:
        found = find_files(source, data_dir)
        files = [file for file in found if file.stat().st_size > 0]
        if not files:
            raise _bad(f"there is no document in {_named(found)}")
        self._rows = _load(source, files, cache_dir)
        # the last paragraph of a file ends in the file's last newline: as a document it is the same without
        self._is_cut = source.file_format() == "text" and source.documents != "file"
        field = "text" if source.file_format() == "text" else source.text_field
        if len(self._rows) == 0:
            raise _bad(f"there is no document in {_named(files)}")
        self._texts = self._rows.select_columns([text_column(self._rows, field)]).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        """A document; empty where the file has nothing."""
        text = str(self._texts[index].column(0)[0].as_py() or "")
        return text.strip("\n") if self._is_cut else text


def quiet_datasets() -> Any:
    """The library, without its progress bars: only the command line talks to people.

    It would try for ten minutes before it says that the Hub is away. Whoever waits for it knows how to (`Batches`).
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.config.STREAMING_READ_MAX_RETRIES = MAX_RETRIES
    datasets.config.STREAMING_OPEN_MAX_RETRIES = MAX_RETRIES
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _load(source: DataOptions, files: list[Path], cache_dir: Path) -> Any:
    datasets = quiet_datasets()
    kind = source.file_format()
    options = {"sample_by": SAMPLE_BY[source.documents]} if kind == "text" else {}
    names = [glob.escape(str(file.absolute())) for file in files]  # the library takes names for patterns
    try:
        return datasets.load_dataset(kind, data_files=names, split="train", cache_dir=str(cache_dir), **options)
    except Exception as error:  # noqa: BLE001 - each reader fails in its own way; what counts is which file, and why
        if len(files) > 1:  # the library does not say which one it was
            for file in files:
                _load(source, [file], cache_dir)
        cause = _deepest(error)
        reason = " ".join(str(cause).split())[:200].rstrip(".") or type(cause).__name__
        if "at least one example" in reason:  # the library's words for a file with nothing in it
            raise _bad(f"there is no document in {_named(files)}") from None
        raise _bad(f"{_named(files)} cannot be read as {kind}: {reason}") from None


def text_column(rows: Any, field: str) -> str:
    """The column with the text.

    Raises:
        TaskError: NO_DATA, there is none of that name, or it holds something else.
    """
    columns = rows.column_names
    if field not in columns:
        raise _bad(f"there is no column {field!r}; the columns are: {', '.join(columns[:20])}")
    kind = getattr(rows.features[field], "dtype", "nested")
    if kind not in ("string", "large_string"):
        raise _bad(f"the column {field!r} holds {kind}, not text")
    return field


def _named(files: list[Path]) -> str:
    more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
    return f"{str(files[0])!r}{more}"


def _deepest(error: BaseException) -> BaseException:
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def _bad(what: str) -> TaskError:
    return TaskError(
        Code.NO_DATA,
        f"The data of the run cannot be used: {what}.",
        fix="Mend or remove the file; or change files, format and text_field under [[task.options.data]] in run.toml.",
    )
