"""How a peer takes part in the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from collab_core.swarm.addresses import parse_address


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmConfig:
    """How this peer takes part in the network; its own business, not the run's."""

    role: Literal["trainer", "aux", "observer"]
    """An observer only looks: nobody sees it."""
    initial_peers: tuple[str, ...] = ()
    """Addresses to join through; if there are any, one of them must answer."""
    rumoured_peers: tuple[str, ...] = ()
    """Addresses that may be old; nobody minds if none of them answers."""
    host_maddrs: tuple[str, ...] = ()
    """Where to listen. Empty: every interface, on the port of the last time or `port`."""
    announce_maddrs: tuple[str, ...] = ()
    """What to tell others instead of the addresses we see ourselves."""
    port: int | None = None
    """None: the port of the last time if it is free, otherwise any."""
    client_mode: bool = False
    """Only dial out. Otherwise we listen, ask others whether they can reach us, and stop listening if they cannot."""
    use_relay: bool = False
    """If nobody can connect to us, be reached through those we join by."""
    stays_direct: bool = False
    """Take part as if reachable whatever others say, and only tell: a run cannot do without its organiser's aux."""
    identity_path: Path | None = None
    """Key file; by default in the state folder."""
    name: str = ""
    """What others see; by default made from the peer ID."""

    def __post_init__(self) -> None:
        """
        Raises:
            SwarmError: BAD_ADDRESS, somebody mistyped one.
        """
        for address in (*self.host_maddrs, *self.announce_maddrs):
            parse_address(address)
        for address in self.initial_peers:
            parse_address(address, needs_peer=True)
