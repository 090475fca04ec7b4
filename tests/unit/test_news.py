"""What a peer passes on of what it heard: the newest of everyone, once, and nothing that runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest
import zstandard
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID

from collab_core.identity import Identity
from collab_core.swarm.news import MAX_BYTES, MAX_NOTES, BadNews, News, Note, Wrapping
from collab_core.swarm.record import PeerRecord, seal


class Asker:
    """Stands for the context of a call: who asks."""

    def __init__(self, peer_id: str) -> None:
        self.remote_id = PeerID.from_base58(peer_id)


@pytest.fixture
def asker(tmp_path: Path) -> Asker:
    return Asker(Identity.load_or_create(tmp_path / "key").peer_id)


def ask(news: News, asker: Asker, token: bytes, seen: int, notes: Iterable[Note] = ()) -> tuple[bytes, int, list[str]]:
    request = BytesValue(value=Wrapping().wrap(token, seen, notes))
    reply = asyncio.run(news.rpc_news(request, asker))  # type: ignore[arg-type]
    token, seen, found = Wrapping().unwrap(reply.value)
    return token, seen, [note.peer_id for note in found]


def test_everything_is_told_once_and_again_after_a_restart(asker: Asker) -> None:
    news = News(lambda notes: None)
    for name in "abc":
        news.keep(Note(name, 10.0, b""))
    token, seen, found = ask(news, asker, b"", 0)
    assert sorted(found) == ["a", "b", "c"]
    assert ask(news, asker, token, seen)[2] == []
    news.keep(Note("b", 11.0, b""))
    token, seen, found = ask(news, asker, token, seen)
    assert found == ["b"]
    restarted = News(lambda notes: None)
    restarted.keep(Note("b", 12.0, b""))
    assert ask(restarted, asker, token, seen)[2] == ["b"]


def test_a_large_swarm_is_told_in_several_answers(asker: Asker) -> None:
    news = News(lambda notes: None)
    names = {f"peer-{i}" for i in range(MAX_NOTES + 10)}
    for name in names:
        news.keep(Note(name, 10.0, b""))
    token, seen, first = ask(news, asker, b"", 0)
    _, _, second = ask(news, asker, token, seen)
    assert len(first) == MAX_NOTES
    assert {*first, *second} == names


def test_nobody_is_told_of_itself_or_of_what_ran_out(asker: Asker) -> None:
    news = News(lambda notes: None)
    news.keep(Note(asker.remote_id.to_base58(), 10.0, b""))
    news.keep(Note("gone", 1.0, b""))
    news.forget(now=5.0)
    assert ask(news, asker, b"", 0)[2] == []
    assert news.newest("gone") == 0.0


def test_a_peer_tells_only_of_itself(asker: Asker) -> None:
    heard: list[Note] = []
    news = News(heard.extend)
    own, foreign = Note(asker.remote_id.to_base58(), 10.0, b"x"), Note("other", 10.0, b"x")
    ask(news, asker, b"", 0, [foreign, own])
    assert heard == [own]


def test_records_of_many_peers_take_a_third_of_their_bytes(tmp_path: Path) -> None:
    notes = []
    for i in range(8):
        identity = Identity.load_or_create(tmp_path / f"{i}.key")
        addresses = [f"/ip4/203.0.113.{i}/tcp/{31330 + i}/p2p/{identity.peer_id}"]
        facts = {"name": f"peer-{i}", "role": "trainer", "mode": "direct", "version": "0.1.0", "phase": "working"}
        record = PeerRecord(**facts, time=1.8e9 + i, root="ab" * 32, loss=3 - i / 7, addresses=addresses)  # type: ignore[arg-type]
        notes.append(Note(identity.peer_id, 1.8e9 + i, seal(record, bytes(32), identity, 1.8e9 + i)))
    wrapped = Wrapping().wrap(b"12345678", 8, notes)
    assert Wrapping().unwrap(wrapped) == (b"12345678", 8, notes)
    assert len(wrapped) < sum(len(note.value) for note in notes) / 3


def wrapped(plain: object) -> bytes:
    packed = msgpack.packb(plain)
    return zstandard.ZstdCompressor().compress(packed)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1", b"\x01", msgpack.packb([b"", 0, []])),
        *(wrapped([b"", 0, [[1, 2, 3]]]), wrapped([0, 0, []]), wrapped(5), wrapped([b"", 0, []])[:-3]),
        wrapped([b"", 0, [["peer", 1.0, bytes(MAX_BYTES)]]]),  # few bytes that would be many
    ],
)
def test_nonsense_is_refused(asker: Asker, data: bytes) -> None:
    with pytest.raises(BadNews):
        asyncio.run(News(lambda notes: None).rpc_news(BytesValue(value=data), asker))  # type: ignore[arg-type]
