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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from collab_core.archive.catalogue import Catalogue
from collab_core.archive.costs import Prefer
from collab_core.archive.encoding import BadEncoding, Kind, encode
from collab_core.archive.index import Place
from collab_core.archive.packs import BadPack, NewItem
from collab_core.archive.retention import Keep
from collab_core.archive.steps import steps_from, steps_to
from collab_core.archive.store import Damaged, Held, Store, whole
from collab_core.archive.sweeping import choose, drop_superseded, sweep
from collab_core.archive.version import BadVersion, Provenance, Version
from collab_core.errors import ArchiveError, Code
from collab_core.identity import Identity
from collab_core.tree import RawTensor, StateTree, TensorEntry


class Archive:
    """Opens an archive, or makes one.

    Args:
        folder: of the archive.
        identity: who signs what is saved; by default a key of the archive's own.
        prefer: whether what is saved should be small or quick to get back.
    """

    def __init__(self, folder: Path, identity: Identity | None = None, prefer: Prefer = Prefer.BALANCED) -> None:
        self.folder, self._prefer = folder, prefer
        try:
            self._catalogue = Catalogue(folder)
            self._identity = identity or Identity.load_or_create(folder / "identity.key")
            self.store = Store(folder)
        except OSError as error:
            raise ArchiveError(
                Code.ARCHIVE_UNWRITABLE,
                f"The archive {folder} cannot be opened: {error.strerror or error}.",
                fix="Give a folder you may write to, on a disk that has room.",
            ) from error

    # --- what is there ---

    def versions(self) -> list[Version]:
        """All versions that are sound, oldest first."""
        return self._catalogue.versions()

    def find(self, reference: str) -> Version:
        """The version of a tag, `latest`, `epoch:12`, or the beginning of a root.

        Raises:
            ArchiveError: NO_VERSION, there is none or more than one.
        """
        return self._catalogue.find(reference)

    def tags(self) -> dict[str, str]:
        """Name → root."""
        return self._catalogue.tags()

    def tag(self, name: str, version: Version) -> None:
        """Give a version a name; of two versions with one name, the last one has it."""
        with self.writing():
            self._catalogue.tag(name, version)

    def version_bytes(self, root: str) -> bytes:
        """A version's file as it was signed."""
        return self._catalogue.signed(root)

    def signer(self, root: str) -> str:
        """Who signed a version."""
        return str(json.loads(self.version_bytes(root))["signer"])

    def is_ours(self, version: Version) -> bool:
        """Whether this archive signed it, so that somebody here made it."""
        return self.signer(version.root) == self._identity.peer_id

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time; the lock is the kernel's and vanishes with the process."""
        try:
            with (self.folder / "lock").open("a+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left_behind in self.folder.rglob(".*.tmp"):  # by a writer that was killed
                    left_behind.unlink(missing_ok=True)
                self.store.index.renew()
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
            self._catalogue.add(version, version.to_bytes(self._identity))
            self._age_steps(self.versions())
        return version

    def take(self, data: bytes, root: str, items: Sequence[NewItem]) -> Version:
        """Keep a version from another archive, if all of it is right.

        Of the items, only tensors of this version that are not here yet are looked at. A version that is here stays as
        it is, but for tensors that it lacks: whoever has the same model may sign it with another story.

        Raises:
            ArchiveError: DAMAGED_VERSION, it is not; nothing of it is kept.
        """
        try:
            version = Version.from_bytes(data, root)
        except BadVersion as error:
            raise _not_what_it_says(root, str(error)) from error
        with self.writing():
            known = next((one for one in self.versions() if one.root == root), None)
            version = known or version
            lacking = {e.digest() for e in version.all_entries() if not self.store.has(e.digest())}
            if known is not None and not lacking:
                return known
            wanted = {item.tensor: item for item in items if item.tensor in lacking}
            before = self.store.packs()
            places = self.store.write(wanted.values())
            try:
                for entry in version.all_entries():
                    self.store.read(entry)
            except Exception as error:
                for pack in {place.pack for place in places} - before:
                    self.store.drop(pack)
                raise _not_what_it_says(root, error.why if isinstance(error, Damaged) else str(error)) from error
            if known is None:
                self._catalogue.add(version, data)
            self._write_whole([e for e in version.all_entries() if self._is_far(e.digest())])
            self._age_steps(self.versions())
            self.drop_unreadable()
        return version

    def drop_unreadable(self) -> None:
        """Packs that nobody can read go, as soon as all versions are whole without them."""
        if (faults := self.store.index.faults()) and all(
            self.store.has(entry.digest()) for version in self.versions() for entry in version.all_entries()
        ):
            for pack in faults:
                self.store.drop(pack)

    def promote(self, version: Version, level: str) -> None:
        """Say, with our signature, that a version has proved to be recoverable in a better way."""
        if version.level != level:
            with self.writing():
                better = replace(version, level=level)
                self._catalogue.add(better, better.to_bytes(self._identity))

    def _is_far(self, tensor: bytes) -> bool:
        return steps_to(self.store, tensor, self._prefer.max_steps) > self._prefer.max_steps

    def _is_whole(self, tensor: bytes) -> bool:
        return any(place.item.kind is not Kind.DELTA for place in self.store.places(tensor))

    def _new_item(self, entry: TensorEntry, raw: RawTensor, base: Version | None) -> NewItem:
        """The newest step of a run stays as it is, for speed; a variant is kept as small as possible."""
        tensor = entry.digest()
        twin = base.twin(entry) if base is not None else None
        if base is None:
            return whole(tensor, raw, Kind.RAW)
        max_steps = self._prefer.max_steps
        is_near = twin is not None and steps_to(self.store, twin.digest(), max_steps) < max_steps
        return self._best(entry, raw, twin if is_near else None)

    def _best(self, entry: TensorEntry, raw: RawTensor, base: TensorEntry | None) -> NewItem:
        """A tensor in the form that costs least, by what this archive should be good at."""
        forms: dict[Kind, list[bytes | memoryview]] = {Kind.PLANES: list(encode(Kind.PLANES, raw.dtype, raw.data))}
        if self._prefer is Prefer.SPEED:
            forms[Kind.RAW] = [raw.data]
        if base is not None:
            forms[Kind.DELTA] = list(encode(Kind.DELTA, raw.dtype, raw.data, self.store.read(base)))

        def price(kind: Kind) -> float:
            # a difference needs its base too, which takes about as long as a whole tensor
            extra = self._prefer.price(0, len(raw.data), Kind.PLANES) if kind is Kind.DELTA else 0.0
            return extra + self._prefer.price(sum(map(len, forms[kind])), len(raw.data), kind)

        kind = min(forms, key=price)
        return NewItem(entry.digest(), kind, base.digest() if base and kind is Kind.DELTA else None, forms[kind])

    # --- settling: older steps become differences, what is stored twice goes ---

    def settle(self) -> None:
        """Finish what a writer that was killed did not get to."""
        with self.writing():
            self._settle(self.versions())

    def _settle(self, versions: list[Version]) -> None:
        self._age_steps(versions)
        self._sweep(versions)

    def _sweep(self, versions: list[Version]) -> None:
        if self._catalogue.unreadable:
            return  # what belongs to them is not known; `verify` names them
        lines, variants = _lines(versions), [version for version in versions if version.is_variant]
        _, far = choose(self.store, lines, variants, self._prefer.max_steps)
        with contextlib.suppress(OSError):  # on a full disk it stays far for now
            self._write_whole(far)
        sweep(self.store, lines, variants, self._prefer.max_steps)

    def _write_whole(self, entries: Sequence[TensorEntry]) -> None:
        """Give tensors a form that needs no other."""
        known = {entry.digest(): entry for entry in entries}

        def items() -> Iterator[NewItem]:
            for tensor, entry in known.items():
                with contextlib.suppress(Damaged):  # it stays as it is, for `verify` to name
                    yield whole(tensor, RawTensor(entry.dtype, entry.shape, self.store.read(entry)), Kind.PLANES)

        for place in self.store.write(items()):
            self._check_written(known[place.item.tensor], place, None)

    def _age_steps(self, versions: list[Version]) -> None:
        """Every step of a run but the newest becomes a difference to the next one."""
        if self._prefer is Prefer.SPEED:
            return  # all of them stay as they are
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

    def _write_differences(
        self, entries: Sequence[TensorEntry], newer: Version, among: Collection[bytes] | None = None
    ) -> None:
        """Encode tensors as differences to their twins in a newer version, or whole where the way would be too long."""
        known = {entry.digest(): entry for entry in entries}  # two that are equal may have twins that are not

        def items() -> Iterator[NewItem]:
            for entry in known.values():
                with contextlib.suppress(Damaged):  # it stays as it is, for `verify` to name
                    yield self._aged(entry, newer.twin(entry), among)

        for place in self.store.write(items()):
            entry = known[place.item.tensor]
            self._check_written(entry, place, newer.twin(entry) if place.item.kind is Kind.DELTA else None)

    def _aged(self, entry: TensorEntry, twin: TensorEntry | None, among: Collection[bytes] | None) -> NewItem:
        """A tensor of an older step; `among` is what differences may be to, if others are about to go."""
        tensor, max_steps = entry.digest(), self._prefer.max_steps
        raw = RawTensor(entry.dtype, entry.shape, self.store.read(entry))
        is_near = (
            twin is not None
            and twin.digest() != tensor
            and steps_to(self.store, twin.digest(), max_steps, among) + steps_from(self.store, tensor) < max_steps
        )
        return self._best(entry, raw, twin if is_near else None)

    def _check_written(self, entry: TensorEntry, place: Place, base: TensorEntry | None) -> None:
        """What was there is deleted only after what replaces it was read back and is right."""
        held = Held(base.digest(), self.store.read(base)) if base is not None else None
        try:
            self.store.decode(entry, [place], held)
        except (BadPack, BadEncoding) as error:
            self.store.drop(place.pack)
            raise Damaged(f"what was written is not what was to be written ({error})") from error

    def _is_raw(self, tensor: bytes) -> bool:
        kinds = {place.item.kind for place in self.store.places(tensor)}
        return kinds == {Kind.RAW}

    # --- letting go ---

    def droppable(self, keep: Keep) -> list[Version]:
        """The versions that need not be kept.

        Raises:
            ArchiveError: DAMAGED_VERSION, nobody knows which ones have a name.
        """
        versions, tagged = self.versions(), set(self._catalogue.sound_tags().values())
        bases = {version.parent for version in versions if version.is_variant}
        found = (version for line in _lines(versions) for version in keep.dropped(line, tagged))
        return [version for version in found if version.root not in bases]

    def collect_garbage(self, keep: Keep) -> list[Version]:
        """Drop the versions that need not be kept; which ones."""
        with self.writing():
            dropped = self.droppable(keep)
            for version in dropped:
                self._catalogue.drop(version)
            versions = self.versions()
            self._sweep(versions)  # on a full disk this comes first, and may be all there is room for
            with contextlib.suppress(OSError):
                there = {entry.digest() for version in versions for entry in version.entries()}
                for line in _lines(versions):
                    self._rebase(line, there)
                self._settle(versions)
        return dropped

    def _rebase(self, line: list[Version], there: Collection[bytes]) -> None:
        """Differences to versions that went become differences to the next one that stayed."""
        for older, newer in zip(reversed(line[:-1]), reversed(line[1:]), strict=True):
            todo = [
                entry
                for entry in older.entries()
                if any(
                    place.item.base is not None and place.item.base not in there
                    for place in self.store.places(entry.digest())
                )
            ]
            self._write_differences(todo, newer, there)

    def close(self) -> None:
        self.store.close()


def _not_what_it_says(root: str, why: str) -> ArchiveError:
    return ArchiveError(
        Code.DAMAGED_VERSION,
        f"The version {root[:12]} from elsewhere is not what it says it is: {why}.",
        fix="Get it from another archive.",
    )


def _lines(versions: Sequence[Version]) -> list[list[Version]]:
    """The steps of every run, oldest first."""
    lines: dict[str | None, list[Version]] = {}
    for version in versions:
        if not version.is_variant:
            lines.setdefault(version.provenance.run_id, []).append(version)
    return list(lines.values())
