"""What a peer gives to whoever asks: the manifest, the run's files, the tree of a state, and chunks by their hash."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, ServicerBase

from collab_core.run.assets import Asset
from collab_core.run.manifest import SignedManifest
from collab_core.state.assembly import Assembly
from collab_core.state.download import unpack_request
from collab_core.state.throttle import Busy, Throttle
from collab_core.swarm.streams import until_closed
from collab_core.tree import CHUNK_BYTES

if TYPE_CHECKING:
    from collab_core.state.snapshot import Snapshot

NUM_SNAPSHOTS = 2  # a newcomer may still be fetching the last epoch's state when the next one is there
MAX_SNAPSHOTS = 4  # and if it is slow, the state it asked for is kept a little longer
PIN_S = 60.0
MAX_ANSWER_BYTES = 2 * CHUNK_BYTES
ALL = b"all"
BUSY = b"busy"


class Giving(ServicerBase):  # type: ignore[misc]
    """Answers others."""

    def __init__(self) -> None:
        self._snapshots: tuple[Snapshot, ...] = ()
        """Newest last; replaced, never changed, as two threads look at it."""
        self._asked_for: dict[str, float] = {}
        self._history: Mapping[int, str] = {}
        self._manifest = b""
        self._assets: Mapping[bytes, bytes] = {}
        self._fetching: tuple[str, Assembly] | None = None
        """Root, and what we have of it: newcomers who come together help each other."""
        self.throttle = Throttle()
        """What we give away of the state per second."""

    def serve_manifest(self, manifest: SignedManifest) -> None:
        self._manifest = manifest.to_bytes()

    def serve_assets(self, files: Mapping[str, bytes]) -> None:
        """From now on, others can fetch these files from us, by their hash."""
        self._assets = {Asset.of(data).hash.encode(): data for data in files.values()}

    def serve_state(self, snapshot: Snapshot, history: Mapping[int, str]) -> None:
        """From now on, others can fetch this state from us."""
        now = time.monotonic()
        older = [one for one in self._snapshots if one.root != snapshot.root]
        recent = older[-(NUM_SNAPSHOTS - 1) :]
        pinned = [one for one in older if now - self._asked_for.get(one.root, -PIN_S) < PIN_S and one not in recent]
        self._snapshots = (*pinned[-(MAX_SNAPSHOTS - NUM_SNAPSHOTS) :], *recent, snapshot)
        asked_for = dict(self._asked_for)  # the reactor's thread adds to it
        self._asked_for = {root: asked for root, asked in asked_for.items() if now - asked < PIN_S}
        self._history = dict(history)

    async def rpc_manifest(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """The run's signed manifest."""
        return BytesValue(value=self._manifest)

    async def rpc_asset(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """A file of the run, by its hash; nothing if we do not have it. An empty message is the end."""
        data = self._assets.get(request.value, b"")
        for start in range(0, len(data), CHUNK_BYTES):
            yield BytesValue(value=data[start : start + CHUNK_BYTES])
        yield BytesValue()
        await until_closed()

    async def rpc_tree(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """History and tree of a state we hold, by root; nothing if we do not hold it. An empty message is the end."""
        snapshot = next((one for one in self._snapshots if one.root.encode() == request.value), None)
        if snapshot is not None:
            self._asked_for[snapshot.root] = time.monotonic()
            history = [[epoch, root] for epoch, root in sorted(self._history.items()) if epoch < snapshot.epoch]
            yield BytesValue(value=msgpack.packb(history))
            data = snapshot.tree.to_bytes()
            for start in range(0, len(data), CHUNK_BYTES):
                yield BytesValue(value=data[start : start + CHUNK_BYTES])
        yield BytesValue()
        await until_closed()

    async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """The chunks asked for, one after the other; nothing if we lack one, or if it is too much.

        If others are before you and it would take long, the answer is BUSY.
        """
        digests = unpack_request(request.value)
        size = 0
        for digest in digests:
            chunk = self._chunk(digest)
            size += 0 if chunk is None else len(chunk)
            if chunk is None or size > MAX_ANSWER_BYTES:
                return BytesValue()
            del chunk
        try:
            await self.throttle.pass_through(size)  # nothing is held meanwhile: the state may well move on
        except Busy:
            return BytesValue(value=BUSY)
        found = [chunk for digest in digests if (chunk := self._chunk(digest)) is not None]
        return BytesValue(value=b"".join(found) if len(found) == len(digests) else b"")

    def _chunk(self, digest: bytes) -> bytes | memoryview | None:
        for snapshot in self._snapshots:
            if (chunk := snapshot.chunk(digest)) is not None:
                self._asked_for[snapshot.root] = time.monotonic()
                return chunk
        return self._fetching[1].get(digest) if self._fetching is not None else None

    async def rpc_have(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Which chunks of a state we have: all, or a bit for each while we fetch it ourselves; nothing if none."""
        if any(one.root.encode() == request.value for one in self._snapshots):
            return BytesValue(value=ALL)
        if self._fetching is None or self._fetching[0].encode() != request.value:
            return BytesValue()
        state = self._fetching[1]
        return BytesValue(value=pack_bits(sorted(state.sizes), state.sizes.keys() - state.missing))


def pack_bits(order: Sequence[bytes], has: Collection[bytes]) -> bytes:
    number = sum(1 << position for position, digest in enumerate(order) if digest in has)
    return number.to_bytes((len(order) + 7) // 8, "little")


def unpack_bits(order: Sequence[bytes], bits: bytes) -> set[bytes]:
    number = int.from_bytes(bits[: (len(order) + 7) // 8], "little")
    return {digest for position, digest in enumerate(order) if number >> position & 1}
