"""A visit to a run: somebody looks, whom nobody sees and of whom nothing stays."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collab_cli import options

if TYPE_CHECKING:
    from collab_core.run import Invite, RunFolder
    from collab_core.session import Session


@contextlib.contextmanager
def visit(
    source: Invite | RunFolder, initial_peers: Sequence[str] | None = None, identity_path: Path | None = None
) -> Iterator[Session]:
    """Join as a guest; with an identity, as one that a peer may know by its key."""
    from collab_core.session import open_session
    from collab_core.swarm import SwarmConfig

    config = SwarmConfig(
        role="observer", client_mode=True, initial_peers=tuple(initial_peers or ()), identity_path=identity_path
    )
    with (
        tempfile.TemporaryDirectory(prefix="collab-guest-") as folder,
        open_session(source, config, state_dir=Path(folder), prepare=options.prepare) as session,
    ):
        yield session
