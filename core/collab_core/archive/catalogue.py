"""Which versions an archive has, and what people call them: one signed file each, and a file of tags."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from collab_core.archive.version import BadVersion, Version
from collab_core.errors import ArchiveError, Code
from collab_core.files import replace_file
from collab_core.tree import is_root

EPOCH = "epoch:"  # how a step of a run is named


class Catalogue:
    """The versions of the archive in a folder. Whoever changes it holds the archive's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._versions_folder = folder, folder / "versions"
        self._versions_folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Version] = {}

    def versions(self) -> list[Version]:
        """All that are sound, oldest first."""
        present = {path.stem for path in self._versions_folder.glob("*.json")}
        for root in self._known.keys() - present:
            del self._known[root]
        for root in present - self._known.keys():
            with contextlib.suppress(BadVersion, OSError):
                self._known[root] = Version.from_bytes(self.signed(root), root)
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
        versions = self.versions()
        if root := self.tags().get(reference):
            found = [version for version in versions if version.root == root]
        elif reference == "latest":
            found = [version for version in versions if not version.is_variant][-1:] or versions[-1:]
        elif reference.startswith(EPOCH):
            steps = [version for version in versions if not version.is_variant]
            found = [version for version in steps if str(version.epoch) == reference.removeprefix(EPOCH)]
        else:
            found = [version for version in versions if len(reference) >= 4 and version.root.startswith(reference)]
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} versions match" if found else "There is no version"
        raise ArchiveError(
            Code.NO_VERSION,
            f"{what} {reference!r} in {self._folder}.",
            fix="`collab models log` lists them. A version is named by a tag, `latest`, `epoch:12` or its root.",
        )

    def tags(self) -> dict[str, str]:
        """Name → root."""
        try:
            body = json.loads((self._folder / "tags.json").read_bytes())
            if body["digest"] == _digest_of_tags(body["tags"]):
                return {name: root for name, root in body["tags"].items() if is_root(root)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return {}

    def tag(self, name: str, version: Version) -> None:
        """Give a version a name; of two versions with one name, the last one has it."""
        tags = self.tags() | {name: version.root}
        body = {"tags": tags, "digest": _digest_of_tags(tags)}
        replace_file(self._folder / "tags.json", json.dumps(body, sort_keys=True).encode())


def _age(version: Version) -> tuple[float, float]:
    return (-1 if version.epoch is None else version.epoch, version.created)


def _digest_of_tags(tags: Mapping[str, str]) -> str:
    return blake3(json.dumps(tags, sort_keys=True).encode()).hexdigest()
