"""A lab per test; without root these tests are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import Lab, missing


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(reason)
    with Lab() as made:
        yield made
