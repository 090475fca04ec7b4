"""Every version of a model, in a folder: the newest one of a run whole, older ones as differences to the next.

    packs/        encoded tensors by identity; immutable
    versions/     one signed JSON file per version, named by its root
    tags.json     names that people gave
    index.sqlite  where everything is; made anew whenever it is in doubt

A version is there as soon as its file is, and its file is written after its tensors. Everything else (turning the last
version into a difference, deleting what is stored twice) happens afterwards and can be repeated at any time, so a
writer may be killed at any byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from collab_core.archive.encoding import Kind, decode_into, encode
from collab_core.archive.index import Place
from collab_core.archive.packs import NewItem, read_item
from collab_core.archive.retention import Keep
from collab_core.archive.store import Damaged, Store, whole
from collab_core.archive.sweeping import drop_superseded, sweep
from collab_core.archive.version import BadVersion, Provenance, Version
from collab_core.errors import ArchiveError, Code
from collab_core.files import replace_file
from collab_core.identity import Identity
from collab_core.tree import RawTensor, StateTree, TensorEntry

MAX_STEPS = 8  # differences on the way to any version
WORTH_IT = 0.8  # a difference larger than this part of the whole is not worth a step


class Archive:
    """Opens an archive, or makes one.

    Args:
        folder: of the archive.
        identity: who signs what is saved; by default a key of the archive's own.
    """

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        self.folder = folder
        self._versions_folder = folder / "versions"
        try:
            self._versions_folder.mkdir(parents=True, exist_ok=True)
            self._identity = identity or Identity.load_or_create(folder / "identity.key")
            self.store = Store(folder)
        except OSError as error:
            raise ArchiveError(
                Code.ARCHIVE_UNWRITABLE,
                f"The archive {folder} cannot be opened: {error.strerror or error}.",
                fix="Give a folder you may write to, on a disk that has room.",
            ) from error
        self._known: dict[str, Version] = {}

    # --- what is there ---

    def versions(self) -> list[Version]:
        """All versions that are sound, oldest first."""
        present = {path.stem for path in self._versions_folder.glob("*.json")}
        for root in self._known.keys() - present:
            del self._known[root]
        for root in present - self._known.keys():
            with contextlib.suppress(BadVersion, OSError):
                self._known[root] = self._load(root)
        return sorted(self._known.values(), key=_age)

    def _load(self, root: str) -> Version:
        return Version.from_bytes(self._path(root).read_bytes(), root)

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
        elif reference.startswith("epoch:"):
            found = [version for version in versions if str(version.epoch) == reference[6:]]
        else:
            found = [version for version in versions if len(reference) >= 4 and version.root.startswith(reference)]
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} versions match" if found else "There is no version"
        raise ArchiveError(
            Code.NO_VERSION,
            f"{what} {reference!r} in {self.folder}.",
            fix="`collab models log` lists them. A version is named by a tag, `latest`, `epoch:12` or its root.",
        )

    def tags(self) -> dict[str, str]:
        """Name → root."""
        try:
            body = json.loads((self.folder / "tags.json").read_bytes())
            if body["digest"] == _digest_of_tags(body["tags"]):
                return dict(body["tags"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {}

    def tag(self, name: str, version: Version) -> None:
        """Give a version a name; of two versions with one name, the last one has it."""
        with self.writing():
            tags = self.tags() | {name: version.root}
            body = {"tags": tags, "digest": _digest_of_tags(tags)}
            replace_file(self.folder / "tags.json", json.dumps(body, sort_keys=True).encode())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time; the lock is the kernel's and vanishes with the process."""
        try:
            with (self.folder / "lock").open("a+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left_behind in self.folder.rglob(".*.tmp"):  # by a writer that was killed
                    left_behind.unlink(missing_ok=True)
                yield
        except OSError as error:
            raise ArchiveError(
                Code.ARCHIVE_UNWRITABLE,
                f"The archive {self.folder} cannot be written: {error.strerror or error}.",
                fix="Make room on the disk, or keep fewer versions: `collab models gc`. What was saved before is safe.",
            ) from error

    # --- saving ---

    def save(
        self,
        tensors: Mapping[str, RawTensor],
        provenance: Provenance,
        *,
        parent: str | None = None,
        is_variant: bool = False,
        files: Mapping[str, bytes] | None = None,
        stored: str = "",
    ) -> Version:
        """Keep a version. It is safe when this returns.

        Args:
            tensors: all that its root is made of.
            provenance: where it comes from.
            parent: root of the version it was made from.
            is_variant: it is a changed copy of its parent, not the next step of a run.
            files: what belongs to the model beside its weights.
            stored: only tensors whose names begin with this are kept; of the others, only the identity.
        """
        contents = {name: RawTensor("uint8", (len(data),), memoryview(data)) for name, data in (files or {}).items()}
        version = Version(
            tree=StateTree.of(tensors),
            parent=parent,
            is_variant=is_variant,
            created=time.time(),
            provenance=provenance,
            stored=stored,
            files=tuple(TensorEntry.of(name, contents[name]) for name in sorted(contents)),
        )
        with self.writing():
            known = {known.root: known for known in self.versions()}
            if version.root in known:
                return known[version.root]
            base = known.get(parent) if is_variant and parent else None
            new: dict[bytes, NewItem] = {}
            for file in version.files:
                if not self.store.has(file.digest()):
                    new[file.digest()] = whole(file.digest(), contents[file.name], Kind.PLANES)
            for entry in version.entries():
                tensor = entry.digest()
                if tensor not in new and not (self._is_whole(tensor) or (is_variant and self.store.has(tensor))):
                    new[tensor] = self._new_item(entry, tensors[entry.name], base)
            self.store.write(new.values())
            replace_file(self._path(version.root), version.to_bytes(self._identity))
            self._known[version.root] = version
            self._age_steps(self.versions())
        return version

    def take(self, data: bytes, root: str, items: Sequence[NewItem]) -> Version:
        """Keep a version from another archive, if all of it is right.

        Raises:
            ArchiveError: DAMAGED_VERSION, it is not; nothing of it is kept.
        """
        with self.writing():
            places = self.store.write(items)
            try:
                version = Version.from_bytes(data, root)
                for entry in version.all_entries():
                    self.store.read(entry)
            except (BadVersion, Damaged) as error:
                why = error.why if isinstance(error, Damaged) else str(error)
                for pack in {place.pack for place in places}:
                    self.store.drop(pack)
                raise ArchiveError(
                    Code.DAMAGED_VERSION,
                    f"The version {root[:12]} from elsewhere is not what it says it is: {why}.",
                    fix="Get it from another archive.",
                ) from error
            replace_file(self._path(root), data)
            self._known[root] = version
            self._age_steps(self.versions())
        return version

    def version_bytes(self, root: str) -> bytes:
        """A version's file as it was signed."""
        return self._path(root).read_bytes()

    def _is_whole(self, tensor: bytes) -> bool:
        return any(place.item.kind is not Kind.DELTA for place in self.store.places(tensor))

    def _new_item(self, entry: TensorEntry, raw: RawTensor, base: Version | None) -> NewItem:
        """The newest step of a run stays as it is, for speed; a variant is kept as small as possible."""
        tensor = entry.digest()
        twin = base.twin(entry) if base is not None else None
        if base is None:
            return whole(tensor, raw, Kind.RAW)
        if twin is None or self._steps_to(twin.digest()) >= MAX_STEPS:
            return whole(tensor, raw, Kind.PLANES)
        return self._smaller(entry, raw, twin, self.store.read(twin))

    def _smaller(self, entry: TensorEntry, raw: RawTensor, base: TensorEntry, base_data: bytearray) -> NewItem:
        """The difference to a base, unless that is hardly smaller than the tensor itself."""
        packed = list(encode(Kind.PLANES, raw.dtype, raw.data))
        delta = list(encode(Kind.DELTA, raw.dtype, raw.data, memoryview(base_data)))
        if sum(map(len, delta)) > WORTH_IT * sum(map(len, packed)):
            return NewItem(entry.digest(), Kind.PLANES, None, packed)
        return NewItem(entry.digest(), Kind.DELTA, base.digest(), delta)

    # --- settling: older steps become differences, what is stored twice goes ---

    def settle(self) -> None:
        """Finish what a writer that was killed did not get to."""
        with self.writing():
            self._settle(self.versions())

    def _settle(self, versions: list[Version]) -> None:
        self._age_steps(versions)
        self._sweep(versions)

    def _sweep(self, versions: list[Version]) -> None:
        sweep(self.store, _lines(versions), [version for version in versions if version.is_variant])

    def _age_steps(self, versions: list[Version]) -> None:
        """Every step of a run but the newest becomes a difference to the next one."""
        for line in _lines(versions):
            newest = {entry.digest() for entry in line[-1].entries()}
            for older, newer in zip(reversed(line[:-1]), reversed(line[1:]), strict=True):
                aged = [e for e in older.entries() if e.digest() not in newest and self._is_raw(e.digest())]
                if not aged:
                    break  # everything older was aged when this one was
                packs = {place.pack for entry in aged for place in self.store.places(entry.digest())}
                self._write_differences(aged, newer)
                for pack in packs:
                    drop_superseded(self.store, pack, newest)

    def _write_differences(self, entries: Sequence[TensorEntry], newer: Version) -> None:
        """Encode tensors as differences to their twins in a newer version, or whole where the way would be too long."""

        def items() -> Iterator[NewItem]:
            for entry in entries:
                with contextlib.suppress(Damaged):  # it stays as it is, for `verify` to name
                    yield self._aged(entry, newer)

        known = {entry.digest(): entry for entry in entries}
        for place in self.store.write(items()):
            self._check_written(known[place.item.tensor], place, newer)

    def _aged(self, entry: TensorEntry, newer: Version) -> NewItem:
        raw = RawTensor(entry.dtype, entry.shape, memoryview(self.store.read(entry)))
        twin = newer.twin(entry)
        if twin is None or twin.digest() == entry.digest() or self._steps_from(entry.digest()) >= MAX_STEPS:
            return whole(entry.digest(), raw, Kind.PLANES)
        return self._smaller(entry, raw, twin, self.store.read(twin))

    def _check_written(self, entry: TensorEntry, place: Place, newer: Version) -> None:
        """What was there is deleted only after what replaces it was read back and is right."""
        twin = newer.twin(entry)
        is_difference = place.item.kind is Kind.DELTA and twin is not None
        data = self.store.read(twin) if is_difference and twin is not None else bytearray(entry.num_bytes)
        decode_into(place.item.kind, entry.dtype, read_item(self.store.path(place.pack), place.item), data)
        if TensorEntry.of("", RawTensor(entry.dtype, entry.shape, memoryview(data))).digest() != entry.digest():
            self.store.drop(place.pack)
            raise Damaged("what was written is not what was to be written")

    def _is_raw(self, tensor: bytes) -> bool:
        kinds = {place.item.kind for place in self.store.places(tensor)}
        return kinds == {Kind.RAW}

    def _steps_from(self, tensor: bytes) -> int:
        """How many differences hang on this tensor, one on the other, if it becomes one itself."""
        below = [place.item.tensor for place in self.store.index.based_on(tensor)]
        return 1 + max((self._steps_from(other) for other in below), default=0)

    def _steps_to(self, tensor: bytes) -> int:
        """How many differences have to be undone to get this tensor."""
        places = self.store.places(tensor)
        if not places or any(place.item.kind is not Kind.DELTA for place in places):
            return 0
        return 1 + min(self._steps_to(place.item.base) for place in places if place.item.base is not None)

    # --- letting go ---

    def collect_garbage(self, keep: Keep) -> list[Version]:
        """Drop the versions that need not be kept; which ones."""
        with self.writing():
            tagged = set(self.tags().values())
            bases = {version.parent for version in self.versions() if version.is_variant}
            dropped = [
                version
                for line in _lines(self.versions())
                for version in keep.dropped(line, tagged)
                if version.root not in bases
            ]
            for version in dropped:
                self._path(version.root).unlink(missing_ok=True)
                self._known.pop(version.root, None)
            versions = self.versions()
            self._sweep(versions)  # on a full disk this comes first, and may be all there is room for
            with contextlib.suppress(OSError):
                for line in _lines(versions):
                    self._rebase(line)
                self._settle(versions)
        return dropped

    def _rebase(self, line: list[Version]) -> None:
        """Differences to versions that went become differences to the next one that stayed."""
        there = {entry.digest() for version in line for entry in version.entries()}
        for older, newer in zip(reversed(line[:-1]), reversed(line[1:]), strict=True):
            todo = [
                entry
                for entry in older.entries()
                if any(
                    place.item.base is not None and place.item.base not in there
                    for place in self.store.places(entry.digest())
                )
            ]
            self._write_differences(todo, newer)

    def close(self) -> None:
        self.store.close()


def _age(version: Version) -> tuple[float, float]:
    return (-1 if version.epoch is None else version.epoch, version.created)


def _lines(versions: Sequence[Version]) -> list[list[Version]]:
    """The steps of every run, oldest first."""
    lines: dict[str | None, list[Version]] = {}
    for version in versions:
        if not version.is_variant:
            lines.setdefault(version.provenance.run_id, []).append(version)
    return list(lines.values())


def _digest_of_tags(tags: Mapping[str, str]) -> str:
    return blake3(json.dumps(tags, sort_keys=True).encode()).hexdigest()
