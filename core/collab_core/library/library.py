"""Our archive, for others: whoever asks gets the versions we have; those we were told to trust may give us theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, ServicerBase

from collab_core.archive import Archive, Prefer, Version
from collab_core.archive.encoding import Kind
from collab_core.archive.store import Held
from collab_core.archive.transfer import tag_from_elsewhere
from collab_core.archive.version import BadVersion
from collab_core.errors import ArchiveError
from collab_core.library.arrivals import PATIENCE_S, Arrivals
from collab_core.library.listing import list_versions
from collab_core.swarm import Swarm

logger = logging.getLogger(__name__)

NAMESPACE = "collab"
PIECE_BYTES = 2**20
MAX_ASKED = 256  # tensors in one question

Form = tuple[int, bytes | None, int]  # kind, base, size


class Library(ServicerBase):  # type: ignore[misc]
    """Answers questions about our archive, one piece at a time. Ask with a `Visitor`.

    Args:
        swarm: where the others are.
        folder: of our archive; None if we have none to show.
        may_push: whether a peer may give us versions.
        prefer: what our archive should be good at.
    """

    def __init__(
        self,
        swarm: Swarm,
        folder: Path | None,
        *,
        may_push: Callable[[str], bool] = lambda peer_id: False,
        prefer: Prefer = Prefer.BALANCED,
    ) -> None:
        self._prefer = prefer
        self._folder, self._may_push = folder, may_push
        self._archive: Archive | None = None
        self._decoded: Held | None = None
        """The last tensor that somebody asked for whole."""
        self._arrivals = Arrivals()
        """What peers are giving us; none of it is in the archive yet."""
        self._is_watching = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collab-library")  # the disk is not the loop's business
        swarm.reactor.run(self.add_p2p_handlers(swarm.p2p, namespace=NAMESPACE), timeout_s=10)

    async def _answer(self, request: BytesValue, action: Callable[..., Any], *more: Any) -> BytesValue:
        """Read a question, ask the archive in its thread, pack the answer; nonsense gets none."""
        if self._folder is None:
            return BytesValue()
        try:
            arguments = msgpack.unpackb(request.value)
            found = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: action(self._opened(), *more, *arguments)
            )
            answer = BytesValue(value=msgpack.packb(found))
        except Exception as error:  # noqa: BLE001 - a stranger's question: whatever it breaks, it gets no answer
            logger.info("no answer from the archive: %r", error)
            return BytesValue()
        return answer

    def _opened(self) -> Archive:
        if self._archive is None:
            assert self._folder is not None
            self._archive = Archive(self._folder, prefer=self._prefer)
        self._archive.store.index.refresh()
        return self._archive

    # --- giving ---

    async def rpc_list(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """What we have."""
        return await self._answer(request, list_versions)

    async def rpc_version(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """A piece of a version's file."""
        return await self._answer(request, _version_piece)

    async def rpc_forms(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """In which encodings we have some tensors."""
        return await self._answer(request, self._forms)

    def _forms(self, archive: Archive, tensors: list[bytes]) -> list[list[Form]]:
        """As they lie in our packs; and as they are, if all we have is differences."""
        if not all(map(is_digest, tensors)):
            raise ValueError
        entries = {entry.digest(): entry for version in archive.versions() for entry in version.all_entries()}
        found = []
        for tensor in tensors[:MAX_ASKED]:
            places = archive.store.places(tensor)
            forms: list[Form] = [(int(place.item.kind), place.item.base, place.item.size) for place in places]
            if places and tensor in entries and all(place.item.base is not None for place in places):
                forms.append((int(Kind.RAW), None, entries[tensor].num_bytes))
            found.append(forms)
        return found

    async def rpc_piece(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """A piece of an encoded tensor."""
        return await self._answer(request, self._item_piece)

    def _item_piece(self, archive: Archive, tensor: bytes, kind: int, base: bytes | None, start: int) -> bytes:
        if not is_digest(tensor) or type(start) is not int or start < 0:
            raise ValueError
        for place in archive.store.places(tensor):
            if (int(place.item.kind), place.item.base) == (kind, base):
                with archive.store.path(place.pack).open("rb") as file:
                    file.seek(place.item.start + start)
                    return file.read(min(PIECE_BYTES, max(0, place.item.size - start)))
        if (kind, base) != (int(Kind.RAW), None):
            return b""
        if self._decoded is None or self._decoded.tensor != tensor:
            entries = {entry.digest(): entry for version in archive.versions() for entry in version.all_entries()}
            self._decoded = Held(tensor, archive.store.read(entries[tensor]))
        return bytes(self._decoded.data[start : start + PIECE_BYTES])

    # --- taking ---

    async def rpc_put(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """A piece of an encoded tensor, from somebody who may."""
        peer_id = context.remote_id.to_base58()
        if not self._may_push(peer_id):
            return BytesValue()
        if not self._is_watching:
            self._watch()
        return await self._answer(request, self._put, peer_id)

    def _watch(self) -> None:
        """Whoever leaves in the middle of a push must not cost us memory until we end."""
        loop = asyncio.get_running_loop()
        self._is_watching = True

        def look() -> None:
            self._is_watching = False
            if self._arrivals.forget_old():
                loop.call_soon_threadsafe(self._watch)

        loop.call_later(PATIENCE_S, self._thread.submit, look)

    def _put(
        self, archive: Archive, peer_id: str, tensor: bytes, kind: int, base: bytes | None, start: int, piece: bytes
    ) -> int:
        """Keep it aside until the version is complete; how much of the tensor there is now."""
        is_sound = is_digest(tensor) and base != tensor and (is_digest(base) if kind == Kind.DELTA else base is None)
        if not is_sound or type(piece) is not bytes or type(start) is not int:
            raise ValueError
        return self._arrivals.put(peer_id, tensor, Kind(kind), base, start, piece)

    async def rpc_commit(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """All tensors of a version are here, says somebody who may: take it, if that is so."""
        peer_id = context.remote_id.to_base58()
        return await self._answer(request, self._commit, peer_id) if self._may_push(peer_id) else BytesValue()

    def _commit(self, archive: Archive, peer_id: str, root: str, data: bytes, tags: list[str]) -> str:
        """Empty if the version is here now; otherwise why not."""
        items = self._arrivals.collect(peer_id)
        try:
            version = Version.from_bytes(data, root)
            if not version.is_variant:
                return "takes no steps of a run from others, only variants"
            archive.take(data, root, items)
            tag_from_elsewhere(archive, version, tags)
        except BadVersion as error:
            return f"does not believe the version ({error})"
        except ArchiveError as error:
            return f"does not take the version ({error.message})"
        return ""


def _version_piece(archive: Archive, root: str, start: int) -> bytes:
    if not any(version.root == root for version in archive.versions()):
        return b""
    return archive.version_bytes(root)[start : start + PIECE_BYTES]


def is_digest(value: object) -> bool:
    return type(value) is bytes and len(value) == 32
