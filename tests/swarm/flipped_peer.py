"""A trainer whose memory goes bad at epoch FLIP_AT: one value each in three tensors, started like the real command.

It writes to FLIP_NOTE how many bytes the chunks with these values have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from collab_cli.app import main
from collab_core.state.replica import Replica
from collab_core.tree import CHUNK_BYTES

FLIP_AT = int(os.environ["FLIP_AT"])


def update_and_flip(self: Replica, *arguments: Any) -> Any:
    stats = sound_update(self, *arguments)
    if self.epoch == FLIP_AT:
        tensors = list(self.layout.views(self.values).values())[:3]
        for tensor in tensors:
            tensor.view(-1)[0] += 1.0
        Path(os.environ["FLIP_NOTE"]).write_text(str(sum(min(tensor.nbytes, CHUNK_BYTES) for tensor in tensors)))
    return stats


sound_update = Replica.update
Replica.update = update_and_flip  # type: ignore[method-assign]
main()
