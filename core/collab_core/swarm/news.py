"""News of everyone, from one neighbour in one message.

The DHT is where peers find each other, but a record stored there and everybody's read from there take a dozen messages
each. So a few times per second everyone tells one other peer its newest record, and hears which records are new there.
All choose the same peer for that, an auxiliary if there is one. Records are signed: a neighbour can keep one back, then
it arrives a little later through the DHT, but it cannot change one. Most of a record is the same in all of them, so
messages are compressed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import zstandard
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

NAMESPACE = "collab"
ANSWER_TIMEOUT_S = 2.0
MAX_NOTES = 256  # in one answer
TOKEN_BYTES = 8
MAX_BYTES = 4 * 2**20  # of a message, unpacked
TYPICAL: bytes = msgpack.packb(
    {
        "name": "trainer-1",
        "role": "trainer",
        "mode": "direct",
        "version": "0.1.0",
        "phase": "working",
        "time": 1.7e9,
        "epoch": 1,
        "root": "0" * 64,
        "parent_root": "0" * 64,
        "history_samples": 1000,
        "epoch_samples": 100,
        "epoch_target": 1600,
        "samples": 3000,
        "epochs": 10,
        "seconds": 400,
        "samples_per_second": 80.0,
        "upload": 2.5e6,
        "download": 1.2e7,
        "loss": 2.0,
        "addresses": ["/ip4/192.168.0.1/tcp/31330/p2p/12D3KooW"],
        "grant": "",
        "checkpoint": None,
        "sentences": [],
        "gossip": None,
    }
)
"""A record as it travels, known to both sides before the first one. Who has another one is heard through the DHT."""


@dataclass(frozen=True, slots=True)
class Note:
    """A peer's sealed record, as it travels."""

    peer_id: str
    expires: float
    value: bytes


class BadNews(Exception):
    """A neighbour talks nonsense."""


class News(ServicerBase):  # type: ignore[misc]
    """The newest note of everyone, for whoever asks. Runs in the reactor's thread.

    Args:
        on_notes: told of everything that arrives.
        renew: keeps our own note as we are now; called before somebody is told everything.
    """

    def __init__(self, on_notes: Callable[[Iterable[Note]], None], renew: Callable[[], None] = lambda: None) -> None:
        self._on_notes, self._renew = on_notes, renew
        self._notes: dict[str, tuple[int, Note]] = {}
        """By peer ID, with a number that grows: whoever asks names the last one it has seen."""
        self._number = 0
        self._token = secrets.token_bytes(TOKEN_BYTES)  # after a restart the numbers begin again
        self._seen: dict[str, tuple[bytes, int]] = {}
        self._told: dict[str, Note] = {}
        self._wrapping = Wrapping()

    async def listen(self, p2p: Any) -> None:
        await self.add_p2p_handlers(p2p, namespace=NAMESPACE)

    def newest(self, peer_id: str) -> float:
        """When the newest note we have of a peer runs out; 0 if we have none."""
        return self._notes[peer_id][1].expires if peer_id in self._notes else 0.0

    def keep(self, note: Note) -> None:
        """Pass this on from now on. The caller has checked its signature."""
        self._number += 1
        self._notes[note.peer_id] = self._number, note

    def forget(self, now: float) -> None:
        """Drop what has run out."""
        self._notes = {peer_id: item for peer_id, item in self._notes.items() if item[1].expires > now}

    def begin_anew(self) -> None:
        """Hear everything from the next one we ask, and what it is doing now, as a newcomer does."""
        self._seen = {}

    async def rpc_news(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """A peer tells its own record, if it is new, and asks for the others'."""
        asker = context.remote_id.to_base58()
        token, seen, notes = self._wrapping.unwrap(request.value)
        self._on_notes(note for note in notes if note.peer_id == asker)
        if token != self._token:  # a newcomer, who may decide on what it hears
            seen = 0
            self._renew()
        fresh = sorted(number for number, note in self._notes.values() if number > seen and note.peer_id != asker)
        last = fresh[:MAX_NOTES][-1] if fresh else max(seen, self._number)
        chosen = [note for number, note in self._notes.values() if seen < number <= last and note.peer_id != asker]
        return BytesValue(value=self._wrapping.wrap(self._token, last, chosen))

    async def ask(self, p2p: Any, neighbour: str, own: Note | None) -> None:
        """Tell a neighbour about us, and hear what it heard. Raises if it does not answer, or nonsense."""
        token, seen = self._seen.get(neighbour, (b"", 0))
        is_told = own is None or self._told.get(neighbour) == own
        stub = self.get_stub(p2p, PeerID.from_base58(neighbour), namespace=NAMESPACE)
        request = BytesValue(value=self._wrapping.wrap(token, seen, [own] if own is not None and not is_told else []))
        reply = await stub.rpc_news(request, timeout=ANSWER_TIMEOUT_S)
        token, seen, notes = self._wrapping.unwrap(reply.value)
        self._seen = {neighbour: (token, seen)}  # of one neighbour only: of another one we hear everything once more
        self._told = {neighbour: own} if own is not None else {}
        self._on_notes(notes)


class Wrapping:
    """Messages in few bytes."""

    def __init__(self) -> None:
        known = zstandard.ZstdCompressionDict(TYPICAL, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        self._pack = zstandard.ZstdCompressor(dict_data=known, write_content_size=False)
        self._unpack = zstandard.ZstdDecompressor(dict_data=known, max_window_size=MAX_BYTES)

    def wrap(self, token: bytes, number: int, notes: Iterable[Note]) -> bytes:
        plain = msgpack.packb([token, number, [[note.peer_id, note.expires, note.value] for note in notes]])
        return self._pack.compress(plain)

    def unwrap(self, data: bytes) -> tuple[bytes, int, list[Note]]:
        """
        Raises:
            BadNews: it is no message.
        """
        try:
            plain = self._unpack.stream_reader(data).read(MAX_BYTES)  # what it says about its size is not believed
            token, number, items = msgpack.unpackb(plain)
            notes = [Note(*item) for item in items[:MAX_NOTES]]
        except (ValueError, TypeError, msgpack.UnpackException, zstandard.ZstdError) as error:
            raise BadNews(repr(error)) from error
        is_sound = all(type(note.peer_id) is str and type(note.expires) is float for note in notes)
        if type(token) is not bytes or type(number) is not int or not is_sound:
            raise BadNews("fields of the wrong type")
        return token, number, notes
