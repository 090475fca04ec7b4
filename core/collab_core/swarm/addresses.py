"""Addresses are multiaddresses: `/ip4/203.0.113.7/tcp/31330/p2p/<peer ID>`."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable, Sequence

from hivemind.utils.multiaddr import Multiaddr

from collab_core.errors import Code, SwarmError

PROBE_TIMEOUT_S = 4.0


def parse_address(text: str, *, needs_peer: bool = False) -> Multiaddr:
    """Read a multiaddress given by a person; words instead of a parser's exception."""
    try:
        address = Multiaddr(text)
        if needs_peer:
            address["p2p"]
        return address
    except Exception as error:
        example = "/ip4/203.0.113.7/tcp/31330" + ("/p2p/12D3Koo..." if needs_peer else "")
        raise SwarmError(
            Code.BAD_ADDRESS, f"{text!r} is not a multiaddress Collab can use.", fix=f"Write it like {example}"
        ) from error


def is_address_of(address: str, peer_id: str) -> bool:
    """Whether something a stranger wrote is an address of that peer, and one we could dial."""
    try:
        parse_address(address, needs_peer=True)
    except SwarmError:
        return False
    place = host_and_port(address)
    return peer_of(address) == peer_id and len(peer_id) <= 64 and place is not None and 0 < place[1] < 65536


def peer_of(address: str) -> str:
    """The peer ID at the end of an address."""
    return address.rpartition("/p2p/")[2]


def host_and_port(address: str) -> tuple[str, int] | None:
    """Where a plain TCP address leads, or None for relayed and other kinds."""
    fields = address.split("/")
    if len(fields) >= 5 and fields[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and fields[3] == "tcp":
        return fields[2], int(fields[4]) if fields[4].isascii() and fields[4].isdigit() else 0
    return None


def best_first(addresses: Iterable[str]) -> list[str]:
    """Public addresses first, loopback last: what a stranger should try in this order."""

    def rank(address: str) -> int:
        place = host_and_port(address)
        try:
            ip = ipaddress.ip_address(place[0] if place else "")
        except ValueError:
            return 0
        return 3 if ip.is_loopback else 2 if ip.is_link_local else 1 if ip.is_private else 0

    return sorted(dict.fromkeys(addresses), key=rank)


async def probe(addresses: Sequence[str]) -> dict[str, str]:
    """Try plain TCP to each address at once. Returns why each failed; an empty reason means it answers."""

    async def reason(address: str) -> str:
        place = host_and_port(address)
        if place is None:
            return ""  # a relayed address: only the daemon can tell
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*place), PROBE_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except (ValueError, OverflowError):
            return "not an address"
        except OSError as error:
            return "connection refused" if isinstance(error, ConnectionRefusedError) else str(error.strerror or error)
        writer.close()
        return ""

    reasons = await asyncio.gather(*(reason(address) for address in addresses))
    return dict(zip(addresses, reasons, strict=True))
