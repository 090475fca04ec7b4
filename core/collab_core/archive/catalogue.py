"""Which versions an archive has, and what people call them: one signed file each, and a file of tags."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from collab_core.archive.version import BadVersion, Version
from collab_core.errors import ArchiveError, Code, ConfigError
from collab_core.files import replace_file
from collab_core.tree import is_root

EPOCH = "epoch:"  # how a step of a run is named
MAX_TAG_CHARS = 100
_ROOT = re.compile(r"[0-9a-f]{4,64}")


def is_start_of(text: str, root: str) -> bool:
    """Whether a root is meant by its beginning."""
    return _ROOT.fullmatch(text) is not None and root.startswith(text)


def is_name(text: object) -> bool:
    """Whether a version may be called so: nothing that means something else, or cannot be shown."""
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= MAX_TAG_CHARS:
        return False
    return text != "latest" and not text.startswith(EPOCH) and _ROOT.fullmatch(text) is None


class Catalogue:
    """The versions of the archive in a folder. Whoever changes it holds the archive's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._versions_folder = folder, folder / "versions"
        self._versions_folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Version] = {}
        self.unreadable: set[str] = set()
        """Roots of versions whose files are damaged, as of the last look."""

    def versions(self) -> list[Version]:
        """All that are sound, oldest first."""
        present = {path.stem for path in self._versions_folder.glob("*.json")}
        for root in self._known.keys() - present:
            del self._known[root]
        for root in present - self._known.keys():
            with contextlib.suppress(BadVersion, OSError):
                self._known[root] = Version.from_bytes(self.signed(root), root)
        self.unreadable = present - self._known.keys()
        return sorted(self._known.values(), key=_age)

    def signed(self, root: str) -> bytes:
        """A version's file as it was signed."""
        return self._path(root).read_bytes()

    def add(self, version: Version, data: bytes) -> None:
        """Keep a version, signed; of two with one root, the last."""
        replace_file(self._path(version.root), data)
        self._known[version.root] = version

    def drop(self, version: Version) -> None:
        self._path(version.root).unlink(missing_ok=True)
        self._known.pop(version.root, None)

    def _path(self, root: str) -> Path:
        return self._versions_folder / f"{root}.json"

    def find(self, reference: str) -> Version:
        """The version of a tag, `latest`, `epoch:12`, or the beginning of a root.

        Raises:
            ArchiveError: NO_VERSION, there is none or more than one.
        """
        found = self._matches(reference)
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} versions match" if found else "There is no version"
        raise ArchiveError(
            Code.NO_VERSION,
            f"{what} {reference!r} in {self._folder}.",
            fix="`collab models log` lists them. A version is named by a tag, `latest`, `epoch:12` or its root.",
        )

    def _matches(self, reference: str) -> list[Version]:
        versions = self.versions()
        steps = [version for version in versions if not version.is_variant]
        # a root comes first, whatever somebody called another one
        if found := [version for version in versions if is_start_of(reference, version.root)]:
            return found
        if root := self.tags().get(reference):
            return [version for version in versions if version.root == root]
        if reference == "latest":
            return steps[-1:] or versions[-1:]
        if reference.startswith(EPOCH):
            return [version for version in steps if str(version.epoch) == reference.removeprefix(EPOCH)]
        return []

    def tags(self) -> dict[str, str]:
        """Name → root, as far as they can be read."""
        return self._read_tags() or {}

    def sound_tags(self) -> dict[str, str]:
        """Name → root.

        Raises:
            ArchiveError: DAMAGED_VERSION, they cannot be read.
        """
        if (tags := self._read_tags()) is None:
            raise ArchiveError(
                Code.DAMAGED_VERSION,
                f"The names of versions, {self._folder / 'tags.json'}, are damaged or were changed by hand.",
                fix="Put back what was there, or delete the file and give the names again: `collab models tag`.",
            )
        return tags

    def _read_tags(self) -> dict[str, str] | None:
        """None: they are damaged."""
        try:
            body = json.loads((self._folder / "tags.json").read_bytes())
            if body["digest"] == _digest_of_tags(body["tags"]):
                return {name: root for name, root in body["tags"].items() if is_root(root)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return None

    def tag(self, name: str, version: Version) -> None:
        """Give a version a name; of two versions with one name, the last one has it.

        Raises:
            ConfigError: BAD_OPTION, it is no name.
            ArchiveError: DAMAGED_VERSION, the other names cannot be read.
        """
        if not is_name(name):
            raise ConfigError(
                Code.BAD_OPTION,
                f"A version cannot be called {name[:MAX_TAG_CHARS]!a}.",
                fix="Choose a name of at most 100 printable characters that does not look like a root or an epoch.",
            )
        tags = self.sound_tags() | {name: version.root}
        body = {"tags": tags, "digest": _digest_of_tags(tags)}
        replace_file(self._folder / "tags.json", json.dumps(body, sort_keys=True).encode())


def _age(version: Version) -> tuple[float, float]:
    return (-1 if version.epoch is None else version.epoch, version.created)


def _digest_of_tags(tags: Mapping[str, str]) -> str:
    return blake3(json.dumps(tags, sort_keys=True).encode()).hexdigest()
