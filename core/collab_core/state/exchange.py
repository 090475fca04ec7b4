"""Giving and getting: the manifest, the run's files, the tree of a state, and chunks by their hash."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints, knows only these

import msgpack
from blake3 import blake3
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID

from collab_core.errors import CollabError
from collab_core.run.assets import Asset
from collab_core.run.manifest import SignedManifest
from collab_core.state.assembly import Assembly
from collab_core.state.download import (
    MESSAGE_TIMEOUT_S,
    MIN_BYTES_PER_SECOND,
    Chunks,
    DonorBusy,
    DonorFailed,
    Download,
    Progress,
    pack_request,
)
from collab_core.state.giving import ALL, BUSY, Giving, unpack_bits
from collab_core.state.pool import ChunkPool
from collab_core.swarm.swarm import Swarm
from collab_core.tree import CHUNK_BYTES, MAX_HISTORY, BadTree, StateTree, is_root

if TYPE_CHECKING:  # who only looks on needs no torch
    import torch

    from collab_core.state.snapshot import Snapshot

NAMESPACE = "collab"  # not the run's hash: a joiner asks for the manifest before it knows it
MAX_HISTORY_BYTES = 2**20
STOP_POLL_S = 0.2
ASK_AROUND_S = 2.0  # how often we ask who has something by now
ASSET_ATTEMPTS, ASSET_PAUSE_S = 3, 0.5  # of a donor whose connection broke


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a state comes from. Asked again and again, as people come and go."""

    holders: Callable[[], Sequence[str]]
    """Who claims to hold all of it, best first."""
    newcomers: Callable[[], Sequence[str]] = tuple
    """Who may be fetching it, as we are."""
    on_bad_donor: Callable[[str, str], None]
    """Told who failed us, and how."""
    on_progress: Callable[[Progress], None] = lambda progress: None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole state from somebody else, every byte checked."""

    tensors: dict[str, torch.Tensor]
    history: dict[int, str]
    num_bytes: int
    """All that came, with what came twice."""
    lost_bytes: dict[str, int]
    """What was under way from each donor that failed us, and had to be asked of others."""
    late_bytes: int
    """What was asked twice at the end, so that nobody waits for the slowest; some of it came twice."""
    donors: tuple[str, ...]


class Exchange(Giving):
    """Gives what this peer has to whoever asks, and gets what it lacks."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__()
        self._swarm = swarm
        self._reaching: dict[str, asyncio.Task[None]] = {}
        """Donors of this download that we connect to, or are connected to."""
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        # In client mode too: nobody can dial us then, but those we are connected to can ask us all the same.
        await self.add_p2p_handlers(self._swarm.p2p, namespace=NAMESPACE)

    def _stub_of(self, peer_id: str) -> Any:
        return type(self).get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)

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
        remaining = list(donors)
        for attempt in range(ASSET_ATTEMPTS):
            await asyncio.sleep(attempt * ASSET_PAUSE_S)
            for donor in list(remaining):
                try:
                    for name in assets.keys() - files.keys():
                        files[name] = await self._fetch_asset(donor, assets[name])
                except DonorFailed as error:
                    remaining.remove(donor)
                    on_bad_donor(donor, str(error))
                except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, others are asked
                    on_bad_donor(donor, f"the connection broke ({type(error).__name__})")
            if files.keys() == assets.keys():
                break
        return files

    async def _fetch_asset(self, donor: str, asset: Asset) -> bytes:
        data = bytearray()
        async for piece in self._stream(donor, "rpc_asset", asset.hash.encode(), asset.size):
            data += piece
            if len(data) > asset.size:
                raise DonorFailed("sent a file that is too large")
        if asset.size and not data:
            raise DonorFailed("does not have the run's files")
        if Asset.of(bytes(data)) != asset:
            raise DonorFailed("sent a file that does not match its hash")
        return bytes(data)

    def fetch_state(
        self,
        root: str,
        sources: Sources,
        own: Snapshot,
        pool: Path,
        stop: threading.Event,
        spare: Sequence[Snapshot] = (),
    ) -> Fetched | None:
        """Fetch the chunks of a state that we lack, from everyone who has them; None if that is not to be had.

        Args:
            root: of the state to get.
            sources: who may have it.
            own: what we have: its chunks are reused, and the state we get must have the same tensors.
            pool: where chunks are kept until all are there; an interrupted download goes on from it.
            stop: gives up when set.
            spare: more whose chunks may be of use.
        """
        future = self._swarm.reactor.spawn(self._fetch_state(root, sources, [own, *spare], ChunkPool(pool)))
        while not concurrent.futures.wait([future], timeout=STOP_POLL_S).done:
            if stop.is_set():
                future.cancel()
                concurrent.futures.wait([future], timeout=STOP_POLL_S)
                return None
        return future.result()

    async def _fetch_state(
        self, root: str, sources: Sources, own: Sequence[Snapshot], pool: ChunkPool
    ) -> Fetched | None:
        failed: set[str] = set()

        def set_aside(donor: str, reason: str) -> None:
            failed.add(donor)
            sources.on_bad_donor(donor, reason)

        found = await self._fetch_any_tree(sources.holders(), root, own[0], set_aside)
        if found is None:
            return None
        tree, history = found
        state = Assembly(tree)
        for digest in list(state.missing):
            if (mine := next((chunk for one in own if (chunk := one.chunk(digest)) is not None), None)) is not None:
                state.put(digest, mine)
        await asyncio.to_thread(pool.open, set(state.missing), state.put)

        def keep(digest: bytes, chunk: bytes) -> None:
            state.put(digest, chunk)
            pool.add(digest, chunk)

        missing = {digest: state.sizes[digest] for digest in state.missing}
        download = Download(missing, self._ask, keep, set_aside, sources.on_progress)
        self._fetching = root, state
        self._reaching.clear()
        asking = asyncio.create_task(self._ask_around(download, root, sources, failed))
        try:
            for donor in sources.holders():
                if donor not in failed:
                    download.offer(donor)
            await download.run()
            if state.missing:
                return None
            num_bytes = download.progress.num_bytes + download.wasted_bytes
            lost_bytes, late_bytes = dict(download.lost_bytes), download.late_bytes
            return Fetched(state.tensors(), history, num_bytes, lost_bytes, late_bytes, download.helpers)
        finally:
            asking.cancel()
            self._fetching = None
            pool.close() if state.missing else pool.clear()

    async def _ask_around(self, download: Download, root: str, sources: Sources, failed: set[str]) -> None:
        """Tell the download of those who got the state since, or parts of it."""
        while True:
            await asyncio.sleep(ASK_AROUND_S)
            for donor in sources.holders():
                if donor not in failed:
                    download.offer(donor)
            asked = [donor for donor in sources.newcomers() if donor not in failed]
            answers = await asyncio.gather(*(self._what_has(donor, root) for donor in asked), return_exceptions=True)
            for donor, has in zip(asked, answers, strict=True):
                if not isinstance(has, BaseException):
                    download.offer(donor, has)

    async def _what_has(self, donor: str, root: str) -> set[bytes] | None:
        """Chunks that a newcomer has; None: all."""
        reply = await self._stub_of(donor).rpc_have(BytesValue(value=root.encode()), timeout=MESSAGE_TIMEOUT_S)
        if reply.value == ALL:
            return None
        return unpack_bits(sorted(self._fetching[1].sizes) if self._fetching is not None else [], reply.value)

    async def _fetch_any_tree(
        self, donors: Sequence[str], root: str, own: Snapshot, set_aside: Callable[[str, str], None]
    ) -> tuple[StateTree, dict[int, str]] | None:
        for donor in donors:
            try:
                return await self._fetch_tree(donor, root, own)
            except DonorFailed as error:
                set_aside(donor, str(error))
            except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
                set_aside(donor, f"the connection broke ({type(error).__name__})")
        return None

    async def _ask(self, donor: str, digests: Chunks) -> bytes:
        if donor not in self._reaching:
            self._reaching[donor] = asyncio.create_task(self._swarm.reach(donor))
        await asyncio.shield(self._reaching[donor])
        reply = await self._stub_of(donor).rpc_chunks(BytesValue(value=pack_request(digests)))
        if reply.value == BUSY and digests != (blake3(BUSY).digest(),):
            raise DonorBusy("is busy")
        return bytes(reply.value)

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

    async def _stream(self, donor: str, method: str, request: bytes, num_bytes: int) -> AsyncIterator[bytes]:
        """A donor's answer, which may neither fall silent nor trickle nor break off."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MESSAGE_TIMEOUT_S + num_bytes / MIN_BYTES_PER_SECOND
        call = getattr(self._stub_of(donor), method)(BytesValue(value=request))
        stream = await asyncio.wait_for(call, MESSAGE_TIMEOUT_S)
        async with contextlib.aclosing(stream):
            while True:
                remaining_s = min(MESSAGE_TIMEOUT_S, deadline - loop.time())
                if remaining_s <= 0:
                    raise DonorFailed("is too slow")
                try:
                    message = await asyncio.wait_for(anext(stream), remaining_s)
                except StopAsyncIteration:  # hivemind 1.1.12 says nothing of a connection that broke
                    raise ConnectionResetError from None
                if not message.value:
                    return
                yield bytes(message.value)


def _read_history(data: bytes) -> dict[int, str]:
    """Roots of past epochs, as the donor tells; junk is worth as much as nothing."""
    try:
        pairs = msgpack.unpackb(data)
        history = {epoch: root for epoch, root in pairs if type(epoch) is int and epoch >= 0 and is_root(root)}
    except (ValueError, TypeError, msgpack.UnpackException):
        return {}
    return dict(sorted(history.items())[-MAX_HISTORY:])
