"""Where a task is loaded: what differs between the organiser, an auxiliary and a volunteer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskContext:
    """What a task may use besides the run's settings."""

    assets: Mapping[str, bytes] = field(default_factory=dict)
    """The run's files (config, tokenizer), by name; the manifest vouches for them."""
    run_dir: Path | None = None
    """The organiser's folder, for paths in the run file. None for those who came by an invite."""
    data_dir: Path | None = None
    """Where local data is; names of files in the run file are relative to it and must stay inside."""
    cache_dir: Path | None = None
    """For what the task makes of its data. None: a folder that is gone afterwards."""
    needs_data: bool = False
    """Data will be asked for: say at once if it is not there."""
