"""A data set on the Hub, streamed: nothing is kept on disk, and a restart goes on exactly where it was.

Peers do not know how many they are, so they cannot split a data set among them. Each goes through its files (or row
groups, where files have them) in an order of its own, and shuffles within a window. Where a peer stands is the file,
the place in it where the window begins, and how much of the window was given: nothing comes twice, nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collab_core.errors import Code, TaskError
from collab_core.hub import check_data_set, hub_in_words
from collab_trainer.causal_lm.documents import quiet_datasets, take
from collab_trainer.causal_lm.options import DataOptions
from collab_trainer.causal_lm.shuffle import Shuffle

WINDOW = 1024  # documents that are shuffled together
FEW_FILES = 16  # above that, files are parts enough; finding their row groups would take a request for each


def open_stream(source: DataOptions) -> Any:
    """The data set, not read yet.

    Raises:
        HubError: it is not there, or not for us.
        TaskError: NO_DATA, it has no text where it should.
    """
    datasets = quiet_datasets()
    if Path(source.repo).exists():  # the library would read that instead, and a stranger may have guessed the name
        raise TaskError(
            Code.NO_DATA,
            f"There is a folder {source.repo!r} here, which would be mistaken for the data set of that name.",
            fix="Start from another folder.",
        )
    with hub_in_words(source.repo, source.revision, kind="dataset"):
        check_data_set(source.repo, source.revision)
        try:
            stream = datasets.load_dataset(
                source.repo, source.name or None, split=source.split, revision=source.revision, streaming=True
            )
        except ValueError as error:  # it has no such split, or no such configuration
            raise _unusable(source, " ".join(str(error).split())[:200].rstrip(".")) from None
        if stream.num_shards < FEW_FILES:
            stream = stream.reshard()  # a parquet file with many row groups is as good as many files
        first = next(iter(stream.take(1)), None)
    _check_row(source, first)
    return stream.select_columns([source.text_field])


def _check_row(source: DataOptions, row: dict[str, Any] | None) -> None:
    if row is None:
        what = "it has no rows"
    elif source.text_field not in row:
        what = f"there is no column {source.text_field!r}; the columns are: {', '.join(list(row)[:20])}"
    elif not isinstance(row[source.text_field], str | None):
        what = f"the column {source.text_field!r} holds {type(row[source.text_field]).__name__}, not text"
    else:
        return
    raise _unusable(source, what)


def _unusable(source: DataOptions, what: str) -> TaskError:
    return TaskError(
        Code.NO_DATA,
        f"The split {source.split!r} of the data set {source.repo} cannot be used: {what}.",
        fix="Change name, split and text_field under [[task.options.data]] in run.toml.",
    )


def streamed(stream: Any, source: DataOptions) -> Iterator[str]:
    """Every document in the order of the data set."""
    with hub_in_words(source.repo, source.revision, kind="dataset"):
        for row in stream:
            yield str(row[source.text_field] or "")


class StreamReader:
    """Documents from the Hub in an order of its own (see `Reader`).

    Args:
        stream: what `open_stream` gave.
        source: the run file's words.
        key: makes the order.
        one_in: the share that is held out.
        position: where an earlier reader was.
    """

    def __init__(
        self, stream: Any, source: DataOptions, *, key: str, one_in: int, position: Mapping[str, Any] | None
    ) -> None:
        self._stream, self._source, self._key, self._one_in = stream, source, key, one_in
        position = position or {}
        self._pass, self._shard = int(position.get("pass", 0)), int(position.get("shard", 0))
        self._window_number, self._given = int(position.get("window", 0)), int(position.get("given", 0))
        self._state: dict[str, Any] | None = position.get("state")
        """Where in the file the window begins; None: at the file's beginning."""
        self._open_shard()

    def _open_shard(self) -> None:
        num_shards = self._stream.num_shards
        order = Shuffle(num_shards, f"{self._key}/{self._pass}")
        self._rows = self._stream.shard(num_shards, order[self._shard])
        if self._state is not None:
            self._rows.load_state_dict(self._state)
        self._iterator: Iterator[dict[str, Any]] = iter(self._rows)
        self._window: list[str] | None = None

    def _fill(self) -> list[str]:
        """Read the window that begins at `_state`, and shuffle it."""
        window: list[str] = []
        with hub_in_words(self._source.repo, self._source.revision, kind="dataset"):
            for row in self._iterator:
                window.append(str(row[self._source.text_field] or ""))
                if len(window) == WINDOW:
                    break
        order = Shuffle(len(window), f"{self._key}/{self._pass}/{self._shard}/{self._window_number}")
        return [window[order[index]] for index in range(len(window))]

    def _advance(self) -> None:
        """Go to the next window: of this file, or of the next one."""
        if self._window is not None and len(self._window) == WINDOW:
            self._state = self._rows.state_dict()
            self._window_number += 1
        else:
            self._shard, self._window_number, self._state = self._shard + 1, 0, None
            if self._shard == self._stream.num_shards:
                self._pass, self._shard = self._pass + 1, 0
            self._open_shard()
        self._given = 0

    def read(self, num_chars: int) -> list[str]:
        window = self._window = self._fill() if self._window is None else self._window
        if self._given == len(window):
            self._advance()
            window = self._window = self._fill()
        found, num_read = take(window[self._given :], num_chars, self._one_in)
        self._given += num_read
        return found

    @property
    def position(self) -> dict[str, Any]:
        return {
            "pass": self._pass,
            "shard": self._shard,
            "window": self._window_number,
            "given": self._given,
            "state": self._state,
        }
