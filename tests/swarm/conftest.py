"""What several tests of swarms need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.in_process import NUM_VALUES, ToySwarm


@pytest.fixture
def toys(short_folder: Path) -> Iterator[ToySwarm]:
    made = ToySwarm(short_folder, NUM_VALUES)
    yield made
    made.close()
