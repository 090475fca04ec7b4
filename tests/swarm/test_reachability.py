"""Dialling back: it proves who answers, and cannot be used to scan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgpack
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID
from lab.proxy import Line, carry
from processes import LOOPBACK, wait_until

from collab_core.errors import CollabError
from collab_core.state.folder import StateFolder
from collab_core.swarm import Swarm, SwarmConfig, transport
from collab_core.swarm.handshake import NotAPeer, who_answers
from collab_core.swarm.reachability import NAMESPACE, DialBack
from collab_core.telemetry import EventLog

Closing = Callable[[Callable[[], None]], object]
RUN_HASH = bytes(32)
BUSY_S = 0.8  # less than the pause before the next daemon


def start(
    folder: Path,
    closing: Closing,
    *initial_peers: str,
    host_maddr: str = LOOPBACK,
    announce_maddrs: tuple[str, ...] = (),
) -> Swarm:
    state = StateFolder(folder)
    closing(state.close)
    events = EventLog(state.events)
    closing(events.close)
    config = SwarmConfig(
        role="trainer", host_maddrs=(host_maddr,), initial_peers=initial_peers, announce_maddrs=announce_maddrs
    )
    swarm = Swarm(config, state, events)
    closing(swarm.close)
    swarm.connect()
    return swarm


def test_a_port_that_the_listening_address_names_is_the_one_others_are_asked_to_dial(
    tmp_path: Path, closing: Closing
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = start(tmp_path / "named", closing, host_maddr=f"/ip4/127.0.0.1/tcp/{port}")
    assert named.port == port_of(named) == port


def test_what_a_person_announces_is_what_others_are_told_and_nobody_is_asked(tmp_path: Path, closing: Closing) -> None:
    first = start(tmp_path / "first", closing)
    announced = "/ip4/203.0.113.7/tcp/31330"
    second = start(tmp_path / "second", closing, *first.addresses, announce_maddrs=(announced,))
    assert second.addresses == [f"{announced}/p2p/{second.peer_id}"]
    assert second.record.mode == "direct"
    told = (tmp_path / "second" / "events.jsonl").read_text() if (tmp_path / "second" / "events.jsonl").exists() else ""
    assert "reachability" not in told


def test_who_answers_but_is_busy_is_asked_again(tmp_path: Path, closing: Closing) -> None:
    first = start(tmp_path / "a", closing)
    times: list[float] = []

    async def answer(near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        with contextlib.closing(near):
            # the look whether anybody is there; then whatever the first daemon tries, which may dial twice
            if len(times) == 1 or times[-1] < times[1] + BUSY_S:
                return
            far_reader, far = await asyncio.open_connection("127.0.0.1", port_of(first))
            with contextlib.closing(far), contextlib.suppress(OSError):
                await asyncio.gather(
                    carry(near_reader, far, Line(), Random(0)), carry(far_reader, near, Line(), Random(0))
                )

    server = first.reactor.run(asyncio.start_server(answer, "127.0.0.1"))
    closing(lambda: first.reactor.run(_stop(server)))
    port = server.sockets[0].getsockname()[1]
    second = start(tmp_path / "b", closing, f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer_id}")
    assert second.bootstrap_peers == [first.peer_id]
    assert len(times) > 2, "the first daemon was turned away"


async def _stop(server: asyncio.Server) -> None:
    server.close()


def port_of(swarm: Swarm) -> int:
    return int(swarm.addresses[0].split("/")[4])


def test_a_handshake_tells_which_peer_answers_and_that_others_are_none(tmp_path: Path, closing: Closing) -> None:
    swarm = start(tmp_path / "a", closing)

    async def talk() -> None:
        assert await who_answers("127.0.0.1", port_of(swarm)) == swarm.peer_id
        for greeting in (b"SSH-2.0-OpenSSH_9.2\r\n", b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n" + bytes(999)):

            async def greet(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes = greeting
            ) -> None:
                with contextlib.closing(writer):
                    writer.write(words)
                    await reader.read(1000)

            async with await asyncio.start_server(greet, "127.0.0.1") as server:
                port = server.sockets[0].getsockname()[1]
                with pytest.raises(NotAPeer):
                    await asyncio.wait_for(who_answers("127.0.0.1", port), 5)
        with pytest.raises(OSError, match=r"."):
            await who_answers("127.0.0.1", port)  # nobody listens there any more

    asyncio.run(talk())


def test_a_peer_is_found_where_it_listens_and_not_where_another_one_does(tmp_path: Path, closing: Closing) -> None:
    first = start(tmp_path / "a", closing)
    second = start(tmp_path / "b", closing, first.addresses[0])
    third = start(tmp_path / "c", closing, first.addresses[0])
    assert second.record.mode == "direct"

    asking = DialBack(third.p2p)
    other = port_of(second)  # an open port with a libp2p peer behind it, but not us
    [answer] = third.reactor.run(asking.ask([second.peer_id], [other], set()))
    assert (answer.reached, answer.missed) == ((), (("127.0.0.1", other),))
    assert not answer.is_good


def test_who_asks_too_often_or_too_much_gets_no_answer(tmp_path: Path, closing: Closing) -> None:
    first = start(tmp_path / "a", closing)
    second = start(tmp_path / "b", closing, first.addresses[0])  # it has just asked when it connected
    assert second.reactor.run(DialBack(second.p2p).ask([first.peer_id], [port_of(second)], set())) == []

    third = start(tmp_path / "c", closing, first.addresses[0])
    stub = DialBack.get_stub(third.p2p, PeerID.from_base58(second.peer_id), namespace=NAMESPACE)
    for junk in (b"", b"\xff\xff", msgpack.packb([22, 80, 443]), msgpack.packb([0]), msgpack.packb(["45.83.7.10"])):
        reply = third.reactor.run(stub.rpc_dial_back(BytesValue(value=junk), timeout=5))
        assert reply.value == b""


def test_relaying_goes_with_no_option_that_says_otherwise(tmp_path: Path) -> None:
    for config in (
        SwarmConfig(role="trainer", use_relay=True, client_mode=True),
        SwarmConfig(role="trainer", use_relay=True, announce_maddrs=("/ip4/45.83.7.10/tcp/31330",)),
    ):
        with pytest.raises(CollabError, match="--use-relay"):
            Swarm(config, StateFolder(tmp_path), EventLog(tmp_path / "events.jsonl"))


def test_a_peer_that_comes_back_joins_through_those_it_met_when_the_invites_peer_is_gone(
    tmp_path: Path, closing: Closing
) -> None:
    with contextlib.ExitStack() as at_first:
        first = start(tmp_path / "first", at_first.callback)
        friend = start(tmp_path / "friend", closing, first.addresses[0])
        with contextlib.ExitStack() as once:
            trainer = start(tmp_path / "trainer", once.callback, first.addresses[0])
            for swarm in (first, friend, trainer):
                swarm.join(RUN_HASH)
            met = tmp_path / "trainer" / "peers.json"
            wait_until(lambda: met.exists() and friend.peer_id in met.read_text(), "the two to meet")
            peer_id = trainer.peer_id
        gone = first.addresses[0]

    again = start(tmp_path / "trainer", closing, gone)
    assert again.bootstrap_peers == [friend.peer_id]
    again.join(RUN_HASH)
    wait_until(lambda: friend.peer_id in {peer.peer_id for peer in again.peers()}, "the friend to be seen")
    wait_until(lambda: peer_id in {peer.peer_id for peer in friend.peers()}, "the same peer to be seen again")


def test_a_port_that_was_taken_meanwhile_is_told_of(tmp_path: Path, closing: Closing) -> None:
    with contextlib.ExitStack() as once:
        old = port_of(start(tmp_path / "peer", once.callback))
    with socket.create_server(("127.0.0.1", old)):
        new = port_of(start(tmp_path / "peer", closing))
    events = [json.loads(line) for line in (tmp_path / "peer" / "events.jsonl").read_text().splitlines()]
    (changed,) = [event for event in events if event["event"] == "port_changed"]
    assert (changed["old"], changed["new"]) == (old, new)
    assert old != new


def test_a_free_port_that_somebody_else_gets_first_is_left_to_it(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_free_port = transport.free_port
    with socket.create_server(("127.0.0.1", 0)) as quicker:
        taken = [quicker.getsockname()[1]]
        monkeypatch.setattr(transport, "free_port", lambda address: taken.pop() if taken else honest_free_port(address))
        assert port_of(start(tmp_path / "peer", closing)) != quicker.getsockname()[1]
    assert not taken
