"""Where this machine keeps its runs."""

from __future__ import annotations

import os
from pathlib import Path


def default_home() -> Path:
    """The folder of all runs, unless a flag says otherwise."""
    if home := os.environ.get("COLLAB_HOME"):
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "collab"
