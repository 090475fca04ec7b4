"""The generated pages are what the generator writes now."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Literal

from pages import DOCS, generator
from pydantic import Field

from collab_core.run.settings import Section


def test_generated_pages_are_up_to_date() -> None:
    for path, text in generator().pages().items():
        assert path.read_text() == text, "run: python docs/generate_reference.py"


def test_check_says_so_in_its_exit_code() -> None:
    result = subprocess.run(
        [sys.executable, str(DOCS / "generate_reference.py"), "--check"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_pages_say_nothing_that_only_python_understands() -> None:
    for path, text in generator().pages().items():
        for odd in ("<class", "inspect.", "None", "000.0"):
            assert odd not in text, path.name


def test_a_word_or_a_number_is_described_in_words() -> None:
    class Steps(Section):
        """Of a trainer."""

        local_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] = "auto"
        """Between two rounds."""

    *_, row = generator("generator.run_file").section_table(Steps, "", {})
    assert row == '| `local_steps` | `"auto"` or a whole number, 1 to 1000 | `"auto"` | Between two rounds. |'
