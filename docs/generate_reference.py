"""Writes the reference pages that follow from the code: the commands, the run file and the dashboard's API.

python docs/generate_reference.py            writes cli.md, run-file.md and api.md in docs/reference
python docs/generate_reference.py --check    changes nothing; fails if a page is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from generator.api import api_page
from generator.commands import cli_page
from generator.run_file import run_file_page

REFERENCE = Path(__file__).parent / "reference"


def pages() -> dict[Path, str]:
    """Every generated page with what it must hold."""
    texts = {"cli.md": cli_page(), "run-file.md": run_file_page(), "api.md": api_page()}
    return {REFERENCE / name: text for name, text in texts.items()}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    if arguments not in ([], ["--check"]):
        say(__doc__ or "")
        return 2
    wrong = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in wrong:
            say(f"{path.name} is not what the code says; run: python docs/generate_reference.py")
        return 1 if wrong else 0
    for path in wrong:
        path.write_text(pages()[path])
        say(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
