"""Addresses: which ones others can use, in which order, and how the daemon wants them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from collab_core.identity import Identity, peer_id_of
from collab_core.swarm.addresses import (
    best_first,
    dialable,
    ipv4_if_any,
    is_address_of,
    is_public,
    source_towards,
    without_loopback,
)
from collab_core.swarm.presence import Presence
from collab_core.swarm.reachability import Answer, verdict

RELAY = "12D3KooWG1RzQ91mB2unQZ7c6hTpdprbeyGMqYLKLoy5p4PM4Pb7"
PEER = "12D3KooWMUBKRf6cBh7CC5khztFSfHb6WcecsuPiMjC4nLKXZUEU"
PUBLIC = f"/ip4/45.83.7.10/tcp/31330/p2p/{PEER}"
PUBLIC6 = f"/ip6/2a0c:5a80:77::10/tcp/31330/p2p/{PEER}"
RELAYED = f"/ip4/45.83.7.11/tcp/31330/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"
HOME = f"/ip4/192.168.1.10/tcp/31330/p2p/{PEER}"
LOOPBACK = f"/ip4/127.0.0.1/tcp/31330/p2p/{PEER}"


def test_public_addresses_come_first_and_loopback_is_not_told_unless_there_is_nothing_else() -> None:
    ordered = best_first([LOOPBACK, HOME, RELAYED, PUBLIC, PUBLIC6])
    assert ordered == [PUBLIC, PUBLIC6, RELAYED, HOME, LOOPBACK]
    assert without_loopback(ordered) == [PUBLIC, PUBLIC6, RELAYED, HOME]
    assert without_loopback([LOOPBACK]) == [LOOPBACK]


def test_a_peer_with_ipv4_is_dialled_over_ipv4() -> None:
    other = f"/ip6/2a0c:5a80:77::10/tcp/31330/p2p/{RELAY}"
    assert ipv4_if_any([PUBLIC, PUBLIC6, other]) == [PUBLIC, other]


def test_relayed_addresses_are_written_as_the_daemon_reads_them() -> None:
    assert dialable(PUBLIC).to_bytes().hex() == "042d53070a067a62"
    data = dialable(RELAYED).to_bytes()
    multihash = data[len(dialable(PUBLIC).to_bytes()) + 3 : -2]
    assert data.endswith(bytes.fromhex("a202"))
    assert peer_id_of(multihash[2:]) == RELAY
    assert is_address_of(RELAYED, PEER)
    assert not is_address_of(RELAYED, RELAY)


def test_homes_are_not_public() -> None:
    assert [is_public(address) for address in (PUBLIC, PUBLIC6, HOME, LOOPBACK)] == [True, True, False, False]
    assert is_public(f"/dns4/example.org/tcp/31330/p2p/{PEER}")


def test_the_way_to_this_machine_comes_from_this_machine() -> None:
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert source_towards("example.org") is None  # never looked up


def test_one_peer_that_cannot_reach_us_is_enough_and_ipv4_decides() -> None:
    place, place6 = ("45.83.7.10", 31330), ("2a0c:5a80:77::10", 31330)
    good = Answer("a", (place,), ())
    assert verdict([]) is None
    assert verdict([good, Answer("b", (place6,), ())]) is True
    assert verdict([good, Answer("b", (), (place,))]) is False
    assert verdict([Answer("a", (place6,), (place,))]) is False
    assert verdict([Answer("a", (place,), (place6,))]) is True


def test_a_peer_id_is_its_public_key(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "key")
    public = (tmp_path / "key").read_bytes()[-32:]
    assert peer_id_of(bytes([0x08, 0x01, 0x12, 0x20]) + public) == identity.peer_id


class Seen:
    """What the daemon sees of its own addresses; it needs some seconds to notice a move."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    async def get_visible_maddrs(self, latest: bool) -> list[str]:
        return [f"/ip4/{host}/tcp/31330/p2p/{PEER}" for host in self.hosts]


@pytest.mark.parametrize("way", [("10.0.0.1", "10.0.0.2", "10.0.0.1"), ("10.0.0.1", "10.0.0.2", "10.0.0.3")])
def test_who_moves_twice_before_the_daemon_has_noticed_tells_where_it_is(way: tuple[str, ...]) -> None:
    end = way[-1]

    async def scene() -> None:
        daemon = Seen(way[0])
        presence = Presence(daemon, PEER, "direct", should_ask=False, stays_direct=False)
        await presence.look()
        for old, new in itertools.pairwise(way):
            presence.move(old, new)
        for _ in range(2):  # the daemon still sees the first one; then the last
            await presence.look()
            assert presence.now() == ("direct", [f"/ip4/{end}/tcp/31330/p2p/{PEER}"])
            daemon.hosts = (end,)

    asyncio.run(scene())
