"""Serving and fetching: the manifest, the run's files, the tree of a state, and chunks by their hash."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import msgpack
import torch
from blake3 import blake3
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from collab_core.errors import CollabError
from collab_core.run.assets import Asset
from collab_core.run.manifest import SignedManifest
from collab_core.state.replica import MAX_HISTORY
from collab_core.state.snapshot import Snapshot
from collab_core.state.tensors import tensor_from
from collab_core.swarm.swarm import Swarm
from collab_core.tree import CHUNK_BYTES, BadTree, StateTree

NAMESPACE = "collab"  # not the run's hash: a joiner asks for the manifest before it knows it
MESSAGE_TIMEOUT_S = 15.0
MAX_CHUNKS_PER_REQUEST = 64
MIN_BYTES_PER_SECOND = 64 * 1024  # a donor slower than this is set aside
NUM_SNAPSHOTS = 2  # a newcomer may still be fetching the last epoch's state when the next one is there
MAX_SNAPSHOTS = 4  # and if it is slow, the state it asked for is kept a little longer
PIN_S = 60.0
MAX_HISTORY_BYTES = 2**20
STOP_POLL_S = 0.2


class DonorFailed(Exception):
    """A donor could not, or would not, give what it promised."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole state from somebody else, every byte checked."""

    tensors: dict[str, torch.Tensor]
    history: dict[int, str]
    num_bytes: int
    donors: tuple[str, ...]


class Exchange(ServicerBase):  # type: ignore[misc]
    """Gives what this peer has to whoever asks, and gets what it lacks."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._snapshots: tuple[Snapshot, ...] = ()
        """Newest last; replaced, never changed, as two threads look at it."""
        self._asked_for: dict[str, float] = {}
        self._history: Mapping[int, str] = {}
        self._manifest = b""
        self._assets: Mapping[bytes, bytes] = {}
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        # In client mode too: nobody can dial us then, but those we are connected to can ask us all the same.
        await self.add_p2p_handlers(self._swarm.p2p, namespace=NAMESPACE)

    def _stub_of(self, peer_id: str) -> Any:
        return type(self).get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)

    # --- giving ---

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
        self._asked_for = {root: asked for root, asked in self._asked_for.items() if now - asked < PIN_S}
        self._history = dict(history)

    async def rpc_manifest(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """The run's signed manifest."""
        return BytesValue(value=self._manifest)

    async def rpc_asset(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """A file of the run, by its hash; nothing if we do not have it."""
        data = self._assets.get(request.value, b"")
        for start in range(0, len(data), CHUNK_BYTES):
            yield BytesValue(value=data[start : start + CHUNK_BYTES])

    async def rpc_tree(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """History and tree of a state we hold, by root; nothing if we do not hold it."""
        snapshot = next((one for one in self._snapshots if one.root.encode() == request.value), None)
        if snapshot is None:
            return
        self._asked_for[snapshot.root] = time.monotonic()
        history = [[epoch, root] for epoch, root in sorted(self._history.items()) if epoch < snapshot.epoch]
        yield BytesValue(value=msgpack.packb(history))
        data = snapshot.tree.to_bytes()
        for start in range(0, len(data), CHUNK_BYTES):
            yield BytesValue(value=data[start : start + CHUNK_BYTES])

    async def rpc_chunks(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """The chunks asked for, in order; the stream ends at the first one we lack."""
        digests = msgpack.unpackb(request.value)
        if not isinstance(digests, list) or len(digests) > MAX_CHUNKS_PER_REQUEST:
            return
        for digest in digests:
            chunk = next((found for one in self._snapshots if (found := one.chunk(digest)) is not None), None)
            if chunk is None:
                return
            yield BytesValue(value=bytes(chunk))

    # --- getting ---

    def fetch_manifest(self, peer_ids: Sequence[str]) -> list[SignedManifest]:
        """What each of these peers offers as the run's manifest; the caller checks which one is right."""
        return self._swarm.reactor.run(self._fetch_manifests(peer_ids))

    async def _fetch_manifests(self, peer_ids: Sequence[str]) -> list[SignedManifest]:
        async def ask(peer_id: str) -> bytes:
            reply = await self._stub_of(peer_id).rpc_manifest(BytesValue(), timeout=MESSAGE_TIMEOUT_S)
            return bytes(reply.value)

        replies = await asyncio.gather(*(ask(peer_id) for peer_id in peer_ids), return_exceptions=True)
        offers = []
        for reply in replies:
            if isinstance(reply, bytes) and reply:
                with contextlib.suppress(CollabError):  # one peer's junk must not hide another's manifest
                    offers.append(SignedManifest.from_bytes(reply))
        return offers

    def fetch_assets(
        self, assets: Mapping[str, Asset], donors: Sequence[str], on_bad_donor: Callable[[str, str], None]
    ) -> dict[str, bytes]:
        """Those of the files that somebody gave us, every byte checked."""
        return self._swarm.reactor.run(self._fetch_assets(assets, donors, on_bad_donor))

    async def _fetch_assets(
        self, assets: Mapping[str, Asset], donors: Sequence[str], on_bad_donor: Callable[[str, str], None]
    ) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for donor in donors:
            try:
                for name in assets.keys() - files.keys():
                    files[name] = await self._fetch_asset(donor, assets[name])
            except DonorFailed as error:
                on_bad_donor(donor, str(error))
            except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
                on_bad_donor(donor, f"the connection broke ({type(error).__name__})")
        return files

    async def _fetch_asset(self, donor: str, asset: Asset) -> bytes:
        data = bytearray()
        async for piece in self._stream(donor, "rpc_asset", asset.hash.encode(), asset.size):
            data += piece
            if len(data) > asset.size:
                raise DonorFailed("sent a file that is too large")
        if Asset.of(bytes(data)) != asset:
            raise DonorFailed("sent a file that does not match its hash" if data else "does not have the run's files")
        return bytes(data)

    def fetch_state(
        self,
        root: str,
        donors: Sequence[str],
        own: Snapshot,
        on_bad_donor: Callable[[str, str], None],
        stop: threading.Event,
    ) -> Fetched | None:
        """Fetch the chunks of a state that we lack, from one donor after the other.

        A donor that dies or lies costs what was in flight; the next one goes on from there.

        Args:
            root: of the state to get.
            donors: who claims to hold it, best first.
            own: what we have: its chunks are reused, and the state we get must have the same tensors.
            on_bad_donor: told who failed us, and how.
            stop: gives up when set.
        """
        future = self._swarm.reactor.spawn(self._fetch_state(root, donors, own, on_bad_donor))
        while not concurrent.futures.wait([future], timeout=STOP_POLL_S).done:
            if stop.is_set():
                future.cancel()
                return None
        return future.result()

    async def _fetch_state(
        self, root: str, donors: Sequence[str], own: Snapshot, on_bad_donor: Callable[[str, str], None]
    ) -> Fetched | None:
        tree: StateTree | None = None
        history: dict[int, str] = {}
        chunks: dict[bytes, bytes | memoryview] = {}
        num_bytes, helped = 0, []
        for donor in donors:
            try:
                if tree is None:
                    tree, history = await self._fetch_tree(donor, root, own)
                    for digest in tree.chunk_sizes():
                        if (mine := own.chunk(digest)) is not None:
                            chunks[digest] = mine
                sizes = tree.chunk_sizes()
                missing = [digest for digest in sizes if digest not in chunks]
                for start in range(0, len(missing), MAX_CHUNKS_PER_REQUEST):
                    wanted = {digest: sizes[digest] for digest in missing[start : start + MAX_CHUNKS_PER_REQUEST]}
                    async for digest, chunk in self._chunks(donor, wanted):
                        chunks[digest] = chunk
                        num_bytes += len(chunk)
                helped.append(donor)
                return Fetched(_assemble(tree, chunks), history, num_bytes, tuple(helped))
            except DonorFailed as error:
                on_bad_donor(donor, str(error))
            except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
                on_bad_donor(donor, f"the connection broke ({type(error).__name__})")
        return None

    async def _fetch_tree(self, donor: str, root: str, own: Snapshot) -> tuple[StateTree, dict[int, str]]:
        own_size = len(own.tree.to_bytes())
        pieces: list[bytes] = []
        async for message in self._stream(donor, "rpc_tree", root.encode(), own_size + MAX_HISTORY_BYTES):
            pieces.append(message)
            if len(pieces) > 2 + own_size // CHUNK_BYTES:
                raise DonorFailed("sent a tree that is too large")
        if not pieces:
            raise DonorFailed("no longer holds that state")
        try:
            tree = StateTree.from_bytes(b"".join(pieces[1:]), root)
        except BadTree as error:
            raise DonorFailed(f"sent a wrong tree: {error}") from error
        if tree.shapes() != own.tree.shapes():
            raise DonorFailed("sent the state of another model")
        return tree, _read_history(pieces[0])

    async def _chunks(self, donor: str, sizes: Mapping[bytes, int]) -> AsyncIterator[tuple[bytes, bytes]]:
        digests = list(sizes)
        received = 0
        async for chunk in self._stream(donor, "rpc_chunks", msgpack.packb(digests), sum(sizes.values())):
            if received == len(digests) or len(chunk) != sizes[digests[received]]:
                raise DonorFailed("sent bytes of the wrong size")
            if blake3(chunk).digest() != digests[received]:
                raise DonorFailed("sent bytes that do not match their hash")
            yield digests[received], chunk
            received += 1
        if received < len(digests):
            raise DonorFailed("no longer holds that state")

    async def _stream(self, donor: str, method: str, request: bytes, num_bytes: int) -> AsyncIterator[bytes]:
        """A donor's answer, which may neither fall silent nor trickle."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MESSAGE_TIMEOUT_S + num_bytes / MIN_BYTES_PER_SECOND
        call = getattr(self._stub_of(donor), method)(BytesValue(value=request))
        stream = await asyncio.wait_for(call, MESSAGE_TIMEOUT_S)
        while True:
            remaining_s = min(MESSAGE_TIMEOUT_S, deadline - loop.time())
            if remaining_s <= 0:
                raise DonorFailed("is too slow")
            try:
                message = await asyncio.wait_for(anext(stream), remaining_s)
            except StopAsyncIteration:
                return
            yield bytes(message.value)


def _read_history(data: bytes) -> dict[int, str]:
    """Roots of past epochs, as the donor tells; junk is worth as much as nothing."""
    try:
        pairs = msgpack.unpackb(data)
        history = {epoch: root for epoch, root in pairs if type(epoch) is int and type(root) is str and len(root) == 64}
    except (ValueError, TypeError, msgpack.UnpackException):
        return {}
    return dict(sorted(history.items())[-MAX_HISTORY:])


def _assemble(tree: StateTree, chunks: Mapping[bytes, bytes | memoryview]) -> dict[str, torch.Tensor]:
    return {
        entry.name: tensor_from(bytearray().join(chunks[digest] for digest in entry.chunks), entry.dtype, entry.shape)
        for entry in tree.entries
    }
