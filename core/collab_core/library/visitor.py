"""Others' archives, for us: list, get and give versions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID

from collab_core.archive import Archive, Version
from collab_core.archive.catalogue import EPOCH
from collab_core.archive.encoding import Kind
from collab_core.archive.mending import complete
from collab_core.archive.packs import BadPack, NewItem, read_item
from collab_core.archive.transfer import Moved, in_order, tag_from_elsewhere
from collab_core.archive.version import BadVersion
from collab_core.errors import ArchiveError, Code
from collab_core.library.library import MAX_ASKED, NAMESPACE, PIECE_BYTES, Form, Library, is_digest
from collab_core.library.listing import Listing
from collab_core.swarm import Swarm
from collab_core.tree import TensorEntry

MAX_VERSION_BYTES = 3 * 2**20
MAX_ITEM_BYTES = 2**30
TIMEOUT_S = 30.0
MAX_TRIES = 3
"""To get a tensor from an archive that changes while it is asked."""


class Visitor:
    """Asks the libraries of other peers. Its methods may be called from any thread.

    Args:
        swarm: where the others are.
        is_trusted: whether a peer is one of the organiser's auxiliaries, who archive the run.
    """

    def __init__(self, swarm: Swarm, is_trusted: Callable[[str], bool] = lambda peer_id: False) -> None:
        self._swarm, self._is_trusted = swarm, is_trusted

    def _ask(self, peer_id: str, method: str, *arguments: Any) -> Any:
        stub = Library.get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)

        async def ask() -> bytes:
            request = BytesValue(value=msgpack.packb(arguments))
            return bytes((await getattr(stub, method)(request, timeout=TIMEOUT_S)).value)

        try:
            answer = self._swarm.reactor.run(ask())
            return msgpack.unpackb(answer, strict_map_key=False) if answer else None
        except Exception as error:
            raise _failed(self._swarm.name_of(peer_id), f"does not answer ({type(error).__name__})") from error

    def versions_of(self, peer_id: str) -> Listing:
        """What a peer's archive has; nothing if it has no archive."""
        found = self._ask(peer_id, "rpc_list")
        try:
            return Listing.parse(found) if found else Listing()
        except (TypeError, AttributeError, IndexError, ValueError) as error:
            raise _failed(self._swarm.name_of(peer_id), "talks nonsense") from error

    def pull(self, peer_id: str, target: Archive, roots: Iterable[str]) -> Moved:
        """Get versions from a peer: only the tensors we lack, in the smallest form that we can use."""
        moved = Moved()
        name = self._swarm.name_of(peer_id)
        for root in roots:
            data = self._collect(peer_id, "rpc_version", (root,), MAX_VERSION_BYTES)
            try:
                version = Version.from_bytes(data, root)
            except BadVersion as error:
                raise _failed(name, f"sent a wrong version ({error})") from error
            if not version.is_variant and not self._is_trusted(json.loads(data)["signer"]):
                raise _failed(name, "offers a step of the run that no auxiliary of the organiser has signed")
            missing = [t for t in {e.digest() for e in version.all_entries()} if not target.store.has(t)]
            items, num_bytes = self._fetch(peer_id, missing, target.store.has)
            moved.bytes += num_bytes
            target.take(data, root, items)
            moved.versions += 1
        return moved

    def _fetch(self, peer_id: str, tensors: Sequence[bytes], has: Callable[[bytes], bool]) -> tuple[list[NewItem], int]:
        """Tensors from a peer, and how many bytes that took.

        Its archive goes on meanwhile: what lay there as it is may be a difference a moment later. What did not come
        whole is asked for again, in whatever form it is there then.
        """
        found: dict[bytes, NewItem] = {}
        num_bytes = 0
        for _ in range(MAX_TRIES):
            lacking = [tensor for tensor in tensors if tensor not in found]
            for tensor, (kind, base, size) in self._choose(peer_id, lacking, has):
                encoded = self._collect(peer_id, "rpc_piece", (tensor, kind, base), size)
                num_bytes += len(encoded)
                if len(encoded) == size:
                    found[tensor] = NewItem(tensor, Kind(kind), base, [encoded])
        return list(found.values()), num_bytes

    def pull_from_all(self, peers: Iterable[str], target: Archive, references: Sequence[str] | None) -> Moved:
        """Versions, with their tags, from whoever has them: what one peer lacks, the next may have.

        Args:
            peers: whom to ask.
            target: our archive.
            references: tags, `latest`, `epoch:12`, or beginnings of roots; None: everything.
        """
        moved, missing = Moved(), set(references or ())
        problem: ArchiveError | None = None
        for peer in peers:
            try:
                missing -= self._pull_some(peer, target, references, moved)
            except ArchiveError as error:  # it left, or lies: the others are asked all the same
                problem = error
        if missing:
            raise problem or ArchiveError(
                Code.NO_VERSION,
                f"No auxiliary of this run that is there has {', '.join(sorted(missing))}.",
                fix="Name a version by a tag, `latest`, `epoch:12` or the beginning of its root.",
            )
        if problem is not None and moved.versions == 0:
            raise problem
        return moved

    def _pull_some(self, peer: str, target: Archive, references: Sequence[str] | None, moved: Moved) -> set[str]:
        """Those of the versions that a peer has; which of the references that were."""
        listing = self.versions_of(peer)
        named = {reference: root for reference in references or () if (root := listing.find(reference))}
        wanted = [root for root in named.values() if root not in listing.roots]  # of many, not all are listed
        wanted += [root for root in listing.roots if not references or root in named.values()]
        have = complete(target, wanted)
        got = self.pull(peer, target, [r for r in in_order(wanted, listing.made_from) if r not in have])
        moved.versions, moved.bytes = moved.versions + got.versions, moved.bytes + got.bytes
        here = {version.root: version for version in target.versions()}
        for reference, root in named.items():
            if reference.startswith(EPOCH) and str(here[root].epoch) != reference.removeprefix(EPOCH):
                raise _failed(self._swarm.name_of(peer), f"gave {root[:12]} for {reference}, which it is not")
        for name, root in listing.tags.items():
            if root in here and root in wanted:
                tag_from_elsewhere(target, here[root], [name])
        return set(named)

    def push_to_any(self, peers: Iterable[str], source: Archive, versions: Sequence[Version]) -> Moved:
        """Give versions to the first peer that takes them."""
        problem = _failed("No auxiliary of this run", "is there")
        for peer in peers:
            try:
                return self.push(peer, source, versions)
            except ArchiveError as error:
                problem = error
        raise problem

    def push(self, peer_id: str, source: Archive, versions: Iterable[Version]) -> Moved:
        """Give versions, with their tags, to a peer that lets us."""
        moved = Moved()
        name = self._swarm.name_of(peer_id)
        known = set(self.versions_of(peer_id).roots)
        for version in versions:
            if version.root in known:
                continue
            entries = {entry.digest(): entry for entry in version.all_entries()}
            tensors = list(entries)
            theirs = self._known_to(peer_id, tensors)
            lacking = [tensor for tensor in tensors if tensor not in theirs]
            bases = {place.item.base for tensor in lacking for place in source.store.places(tensor) if place.item.base}
            theirs |= self._known_to(peer_id, sorted(bases))
            for tensor in lacking:
                moved.bytes += self._send(peer_id, source, entries[tensor], theirs)
            tags = [tag for tag, root in source.tags().items() if root == version.root]
            why = self._ask(peer_id, "rpc_commit", version.root, source.version_bytes(version.root), tags)
            if why != "":
                raise _failed(name, why or f"takes no versions from {self._swarm.peer_id}")
            moved.versions += 1
        return moved

    def _send(self, peer_id: str, source: Archive, entry: TensorEntry, theirs: set[bytes]) -> int:
        """A tensor in the smallest form that the other side can use; as it is, if all we have is differences."""
        tensor = entry.digest()
        kind, base, data = Kind.RAW, None, memoryview(b"")
        fit = [p for p in source.store.places(tensor) if p.item.base is None or p.item.base in theirs]
        for best in sorted(fit, key=lambda place: place.item.size):
            with contextlib.suppress(BadPack):  # damaged, or just replaced: there are other ways
                data = read_item(source.store.path(best.pack), best.item)
                kind, base = best.item.kind, best.item.base
                break
        else:
            data = source.store.read(entry)
        for start in range(0, max(1, len(data)), PIECE_BYTES):  # a tensor may well be empty
            piece = bytes(data[start : start + PIECE_BYTES])
            got = self._ask(peer_id, "rpc_put", tensor, int(kind), base, start, piece)
            if got != start + len(piece):
                raise _failed(self._swarm.name_of(peer_id), f"takes no versions from {self._swarm.peer_id}")
        return len(data)

    def _known_to(self, peer_id: str, tensors: Sequence[bytes]) -> set[bytes]:
        found = set()
        for start in range(0, len(tensors), MAX_ASKED):
            some = tensors[start : start + MAX_ASKED]
            found |= {tensor for tensor, known in zip(some, self._forms_of(peer_id, some), strict=False) if known}
        return found

    def _choose(self, peer_id: str, tensors: Sequence[bytes], has: Callable[[bytes], bool]) -> list[tuple[bytes, Form]]:
        """For each tensor the smallest form whose base we have."""
        chosen = []
        for start in range(0, len(tensors), MAX_ASKED):
            some = tensors[start : start + MAX_ASKED]
            for tensor, forms in zip(some, self._forms_of(peer_id, some), strict=False):
                fit = [(kind, base, size) for kind, base, size in forms if base is None or has(base)]
                if not fit or min(size for *_, size in fit) > MAX_ITEM_BYTES:
                    continue  # `take` says what is missing
                chosen.append((tensor, min(fit, key=lambda form: form[2])))
        return chosen

    def _forms_of(self, peer_id: str, tensors: Sequence[bytes]) -> list[list[Form]]:
        """In which forms a peer has these tensors."""
        answers = self._ask(peer_id, "rpc_forms", list(tensors)) or []
        try:
            return [[_parse_form(form) for form in forms] for forms in answers]
        except (TypeError, ValueError) as error:
            raise _failed(self._swarm.name_of(peer_id), "talks nonsense") from error

    def _collect(self, peer_id: str, method: str, what: tuple[Any, ...], max_bytes: int) -> bytes:
        data = bytearray()
        while piece := self._ask(peer_id, method, *what, len(data)):
            if type(piece) is not bytes:
                raise _failed(self._swarm.name_of(peer_id), "talks nonsense")
            data += piece
            if len(data) > max_bytes:
                raise _failed(self._swarm.name_of(peer_id), "sends more than it said")
            if len(piece) < PIECE_BYTES:
                break
        return bytes(data)


def _parse_form(form: Any) -> Form:
    kind, base, size = form
    if type(kind) is not int or type(size) is not int or size < 0 or not (base is None or is_digest(base)):
        raise ValueError(f"not a form: {form!r}")
    return Kind(kind), base, size


def _failed(name: str, why: str) -> ArchiveError:
    return ArchiveError(
        Code.NO_TRANSFER,
        f"{name} {why}.",
        fix="Try another peer, or a folder. To take versions, a peer is started with --accept-models PEER_ID.",
    )
