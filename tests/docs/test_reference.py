"""The generated pages are what the generator writes now."""

from __future__ import annotations

import subprocess
import sys

from pages import DOCS, generator


def test_generated_pages_are_up_to_date() -> None:
    for path, text in generator().pages().items():
        assert path.read_text() == text, "run: python docs/generate_reference.py"


def test_check_says_so_in_its_exit_code() -> None:
    result = subprocess.run(
        [sys.executable, str(DOCS / "generate_reference.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "")
