"""Addresses are multiaddresses: `/ip4/203.0.113.7/tcp/31330/p2p/<peer ID>`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence

import base58
from hivemind.utils.multiaddr import Multiaddr

from collab_core.errors import Code, SwarmError

PROBE_TIMEOUT_S = 4.0
P2P_CODE, CIRCUIT_CODE = b"\xa5\x03", b"\xa2\x02"  # varints of the protocols p2p (421) and p2p-circuit (290)


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


def is_relayed(address: str) -> bool:
    """Whether an address leads through another peer: `/ip4/…/tcp/…/p2p/<relay>/p2p-circuit/p2p/<peer ID>`."""
    return "/p2p-circuit" in address


def dialable(address: str) -> Multiaddr:
    """An address as the daemon wants it: without the peer ID at its end.

    hivemind 1.1.12 writes an Ed25519 peer ID inside an address as a CID, which the daemon cannot read ("length greater
    than remaining number of bytes"). Only relayed addresses have one; we write the plain multihash instead.
    """
    place, _, _ = address.rpartition("/p2p/")
    if not is_relayed(address):
        return Multiaddr(place)
    first, _, rest = place.partition("/p2p/")
    relay = base58.b58decode(rest.partition("/")[0])
    return Multiaddr(Multiaddr(first).to_bytes() + P2P_CODE + bytes([len(relay)]) + relay + CIRCUIT_CODE)


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, not of a home or office network."""
    place = host_and_port(address)
    try:
        return place is not None and ipaddress.ip_address(place[0]).is_global
    except ValueError:
        return place is not None and place[0] != "localhost"  # a name


def place_of(host: str, port: int) -> str:
    """The multiaddress of a TCP port."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def source_towards(host: str) -> str | None:
    """Which address of this machine packets to another would come from; None if there is no way. Sends nothing."""
    try:
        ipaddress.ip_address(host)  # a name would have to be looked up
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probing:
            probing.connect((host, 9))
            return str(probing.getsockname()[0])
    except (OSError, ValueError):
        return None


def is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Where the TCP connection to an address goes (to the relay, if it is relayed); None for other kinds."""
    fields = address.split("/")
    if len(fields) >= 5 and fields[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and fields[3] == "tcp":
        return fields[2], int(fields[4]) if fields[4].isascii() and fields[4].isdigit() else 0
    return None


def best_first(addresses: Iterable[str]) -> list[str]:
    """Public addresses first, then relayed ones, loopback last: what a stranger should try in this order."""

    def rank(address: str) -> int:
        place = host_and_port(address)
        try:
            ip = ipaddress.ip_address(place[0] if place else "")
        except ValueError:
            return 0
        if is_relayed(address):
            return 1
        return 4 if ip.is_loopback else 3 if ip.is_link_local else 2 if ip.is_private else 0

    return sorted(dict.fromkeys(addresses), key=rank)


def ipv4_if_any(addresses: Sequence[str]) -> list[str]:
    """For each peer its IPv4 addresses, if it has any.

    Nearly everyone has IPv4 and many have nothing else. Connections over it show whether we can be reached over it.
    """
    has_ipv4 = {peer_of(address) for address in addresses if address.startswith("/ip4/")}
    return [address for address in addresses if address.startswith("/ip4/") or peer_of(address) not in has_ipv4]


def without_loopback(addresses: Sequence[str]) -> list[str]:
    """What others can use. A peer that has nothing but loopback keeps it: its swarm is on this machine."""

    def is_useless(address: str) -> bool:
        place = host_and_port(address)
        return place is not None and is_loopback(place[0])

    return [address for address in addresses if not is_useless(address)] or list(addresses)


async def probe(addresses: Sequence[str]) -> dict[str, str]:
    """Try plain TCP to each address at once. Returns why each failed; an empty reason means it answers."""

    async def reason(address: str) -> str:
        place = host_and_port(address)
        if place is None:
            return ""  # another kind of address: only the daemon can tell
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*place), PROBE_TIMEOUT_S)
        except TimeoutError:
            return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        except (ValueError, OverflowError):
            return "not an address"
        except OSError as error:
            return "connection refused" if isinstance(error, ConnectionRefusedError) else str(error.strerror or error)
        writer.close()
        return ""

    reasons = await asyncio.gather(*(reason(address) for address in addresses))
    return dict(zip(addresses, reasons, strict=True))
