"""Finding the archive a person means."""

from __future__ import annotations

from pathlib import Path

from collab_core.errors import ArchiveError, Code
from collab_core.home import default_home

FOLDER = "archive"  # in a peer's state folder


def is_archive(folder: Path) -> bool:
    try:
        return (folder / "versions").is_dir()
    except OSError:  # a folder that we may not enter
        return False


def locate(given: Path | None, *, may_create: bool = False) -> Path:
    """The archive of a state folder, a bare one, or the only one on this machine.

    Raises:
        ArchiveError: NO_ARCHIVE, there is none, or it is not clear which.
    """
    if given is not None:
        for folder in (given / FOLDER, given):
            if is_archive(folder):
                return folder
        if may_create and not (given / "identity.key").exists():
            return given
        raise ArchiveError(
            Code.NO_ARCHIVE,
            f"There is no archive in {given}.",
            fix="Give the state folder of an auxiliary peer, or a folder that `collab models save` made.",
        )
    found = sorted(path.parent for path in default_home().glob(f"*/*/{FOLDER}/versions"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArchiveError(
            Code.NO_ARCHIVE,
            f"This machine keeps no archive in {default_home()}.",
            fix="Say where it is: --state-dir FOLDER. An archive is made by `collab aux`, or by `collab models save`.",
        )
    listed = "".join(f"\n  --state-dir {path}" for path in found)
    raise ArchiveError(Code.NO_ARCHIVE, f"This machine keeps {len(found)} archives.", fix=f"Say which one:{listed}")
