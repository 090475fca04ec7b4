"""Serving and fetching: the manifest, the tree of a state, and chunks by their hash."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import msgpack
import torch
from blake3 import blake3
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, P2PDaemonError, P2PHandlerError, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from collab_core.run.manifest import SignedManifest
from collab_core.state.snapshot import Snapshot
from collab_core.state.tree import CHUNK_BYTES, DTYPES, MAX_TREE_BYTES, BadTree, StateTree
from collab_core.swarm.swarm import Swarm

NAMESPACE = "collab"  # not the run's hash: a joiner asks for the manifest before it knows it
MESSAGE_TIMEOUT_S = 15.0
MAX_CHUNKS_PER_REQUEST = 64
NUM_SNAPSHOTS = 2  # a newcomer may still be fetching the last epoch's state when the next one is there
NETWORK_ERRORS = (asyncio.TimeoutError, StopAsyncIteration, P2PDaemonError, P2PHandlerError, ControlFailure, OSError)


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
        self._snapshots: deque[Snapshot] = deque(maxlen=NUM_SNAPSHOTS)
        self._history: Mapping[int, str] = {}
        self._manifest = b""
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        if not self._swarm.config.client_mode:
            await self.add_p2p_handlers(self._swarm.p2p, namespace=NAMESPACE)

    def _stub_of(self, peer_id: str) -> Any:
        return type(self).get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)

    # --- giving ---

    def serve_manifest(self, manifest: SignedManifest) -> None:
        self._manifest = manifest.to_bytes()

    def serve_state(self, snapshot: Snapshot, history: Mapping[int, str]) -> None:
        """From now on, others can fetch this state from us."""
        self._snapshots.append(snapshot)
        self._history = dict(history)

    async def rpc_manifest(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """The run's signed manifest."""
        return BytesValue(value=self._manifest)

    async def rpc_tree(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """History and tree of a state we hold, by root; nothing if we do not hold it."""
        snapshot = next((one for one in self._snapshots if one.root.encode() == request.value), None)
        if snapshot is None:
            return
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
        return [SignedManifest.from_bytes(reply) for reply in replies if isinstance(reply, bytes) and reply]

    def fetch_state(
        self, root: str, donors: Sequence[str], own: Snapshot | None, on_bad_donor: Callable[[str, str], None]
    ) -> Fetched | None:
        """Fetch the chunks of a state that we lack, from one donor after the other.

        A donor that dies or lies costs what was in flight; the next one goes on from there.
        """
        return self._swarm.reactor.run(self._fetch_state(root, donors, own, on_bad_donor))

    async def _fetch_state(
        self, root: str, donors: Sequence[str], own: Snapshot | None, on_bad_donor: Callable[[str, str], None]
    ) -> Fetched | None:
        tree: StateTree | None = None
        history: dict[int, str] = {}
        chunks: dict[bytes, bytes | memoryview] = {}
        num_bytes, helped = 0, []
        for donor in donors:
            try:
                if tree is None:
                    tree, history = await self._fetch_tree(donor, root)
                    for digest in tree.chunk_sizes():
                        if own is not None and (mine := own.chunk(digest)) is not None:
                            chunks[digest] = mine
                missing = [digest for digest in tree.chunk_sizes() if digest not in chunks]
                for start in range(0, len(missing), MAX_CHUNKS_PER_REQUEST):
                    async for digest, chunk in self._chunks(donor, missing[start : start + MAX_CHUNKS_PER_REQUEST]):
                        chunks[digest] = chunk
                        num_bytes += len(chunk)
                helped.append(donor)
                return Fetched(_assemble(tree, chunks), history, num_bytes, tuple(helped))
            except DonorFailed as error:
                on_bad_donor(donor, str(error))
            except NETWORK_ERRORS:
                on_bad_donor(donor, "the connection broke")
        return None

    async def _fetch_tree(self, donor: str, root: str) -> tuple[StateTree, dict[int, str]]:
        stream = await self._stub_of(donor).rpc_tree(BytesValue(value=root.encode()))
        pieces: list[bytes] = []
        size = 0
        async for message in _timed(stream):
            pieces.append(message.value)
            size += len(message.value)
            if size > 2 * MAX_TREE_BYTES:
                raise DonorFailed("sent a tree that is too large")
        if not pieces:
            raise DonorFailed("no longer holds that state")
        try:
            history = {int(epoch): str(known) for epoch, known in msgpack.unpackb(pieces[0])}
            return StateTree.from_bytes(b"".join(pieces[1:]), root), history
        except (BadTree, ValueError, TypeError, msgpack.UnpackException) as error:
            raise DonorFailed(f"sent a wrong tree: {error}") from error

    async def _chunks(self, donor: str, digests: list[bytes]) -> AsyncIterator[tuple[bytes, bytes]]:
        stream = await self._stub_of(donor).rpc_chunks(BytesValue(value=msgpack.packb(digests)))
        received = 0
        async for message in _timed(stream):
            if received == len(digests) or blake3(message.value).digest() != digests[received]:
                raise DonorFailed("sent bytes that do not match their hash")
            yield digests[received], message.value
            received += 1
        if received < len(digests):
            raise DonorFailed("no longer holds that state")


async def _timed(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """A stream that may not fall silent."""
    while True:
        try:
            message = await asyncio.wait_for(anext(stream), MESSAGE_TIMEOUT_S)
        except StopAsyncIteration:
            return
        yield message


def _assemble(tree: StateTree, chunks: Mapping[bytes, bytes | memoryview]) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry in tree.entries:
        data = bytearray().join(chunks[digest] for digest in entry.chunks)
        flat = torch.frombuffer(data, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape)) if data else None
        tensors[entry.name] = torch.empty(entry.shape) if flat is None else flat.view(entry.shape)
    return tensors
