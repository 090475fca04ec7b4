"""News of everyone, from one neighbour in one message.

The DHT is where peers find each other, but a record stored there and everybody's read from there take a dozen messages
each. So a few times per second everyone tells one other peer its newest record, and hears which records are new there.
All choose the same peer for that, an auxiliary if there is one. Records are signed: a neighbour can keep one back, then
it arrives a little later through the DHT, but it cannot change one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

NAMESPACE = "collab"
ANSWER_TIMEOUT_S = 2.0
MAX_NOTES = 256  # in one answer
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Note:
    """A peer's sealed record, as it travels."""

    peer_id: str
    expires: float
    value: bytes


class BadNews(Exception):
    """A neighbour talks nonsense."""


class News(ServicerBase):  # type: ignore[misc]
    """The newest note of everyone, for whoever asks. Runs in the reactor's thread."""

    def __init__(self, on_notes: Callable[[Iterable[Note]], None]) -> None:
        self._on_notes = on_notes
        self._notes: dict[str, tuple[int, Note]] = {}
        """By peer ID, with a number that grows: whoever asks names the last one it has seen."""
        self._number = 0
        self._token = secrets.token_bytes(TOKEN_BYTES)  # after a restart the numbers begin again
        self._seen: dict[str, tuple[bytes, int]] = {}
        self._told: dict[str, Note] = {}

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

    async def rpc_news(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """A peer tells its own record, if it is new, and asks for the others'."""
        asker = context.remote_id.to_base58()
        token, seen, notes = _unpack(request.value)
        self._on_notes(note for note in notes if note.peer_id == asker)
        if token != self._token:
            seen = 0
        fresh = sorted(number for number, note in self._notes.values() if number > seen and note.peer_id != asker)
        last = fresh[:MAX_NOTES][-1] if fresh else max(seen, self._number)
        chosen = [note for number, note in self._notes.values() if seen < number <= last and note.peer_id != asker]
        return BytesValue(value=_pack(self._token, last, chosen))

    async def ask(self, p2p: Any, neighbour: str, own: Note | None) -> None:
        """Tell a neighbour about us, and hear what it heard. Raises if it does not answer, or nonsense."""
        token, seen = self._seen.get(neighbour, (b"", 0))
        is_told = own is None or self._told.get(neighbour) == own
        stub = self.get_stub(p2p, PeerID.from_base58(neighbour), namespace=NAMESPACE)
        request = BytesValue(value=_pack(token, seen, [own] if own is not None and not is_told else []))
        reply = await stub.rpc_news(request, timeout=ANSWER_TIMEOUT_S)
        token, seen, notes = _unpack(reply.value)
        self._seen = {neighbour: (token, seen)}  # of one neighbour only: of another one we hear everything once more
        self._told = {neighbour: own} if own is not None else {}
        self._on_notes(notes)


def _pack(token: bytes, number: int, notes: Iterable[Note]) -> bytes:
    data: bytes = msgpack.packb([token, number, [[note.peer_id, note.expires, note.value] for note in notes]])
    return data


def _unpack(data: bytes) -> tuple[bytes, int, list[Note]]:
    try:
        token, number, items = msgpack.unpackb(data)
        notes = [Note(*item) for item in items[:MAX_NOTES]]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadNews(repr(error)) from error
    is_sound = all(type(note.peer_id) is str and type(note.expires) is float for note in notes)
    if type(token) is not bytes or type(number) is not int or not is_sound:
        raise BadNews("fields of the wrong type")
    return token, number, notes
