"""Our end of the libp2p daemon: started, started again in another mode, looked after, stopped."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from collab_core.errors import Code, RunError, SwarmError
from collab_core.state.folder import StateFolder
from collab_core.swarm.addresses import host_and_port, ipv4_if_any
from collab_core.swarm.config import SwarmConfig
from collab_core.swarm.daemon import Daemon, free_port
from collab_core.swarm.presence import Presence
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import Mode
from collab_core.telemetry.events import EventLog

EVERYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
RELAY_TIMEOUT_S = 8.0
PORT_ATTEMPTS = 4
CONNECT_ATTEMPTS = 3  # with pauses of 1 and 2 seconds between them
MAX_MESSAGE_BYTES = 8 * 2**20


class OpenCalls(dict[Any, Any]):
    """Calls that somebody still waits for.

    hivemind 1.1.12 gives an answer to whoever is in this table. If that call was cancelled a moment before, it raises,
    and no answer is ever read again. So whoever does not wait any more is not in it.
    """

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


def close_when_dropped(kind: type[asyncio.StreamWriter]) -> None:
    """As Python does since 3.11.5: hivemind drops the writers of calls that fail or are cancelled, and before that
    their sockets stayed open, until there were no more to be had."""

    def close(self: asyncio.StreamWriter) -> None:
        if not self.transport.is_closing() and not self._loop.is_closed():  # type: ignore[attr-defined]
            self.transport.close()

    kind.__del__ = close  # type: ignore[method-assign]


if sys.version_info < (3, 11, 5):
    close_when_dropped(asyncio.StreamWriter)


class Transport:
    """One daemon at a time, and hivemind's way of talking to it."""

    def __init__(
        self,
        config: SwarmConfig,
        folder: StateFolder,
        identity_path: Path,
        peer_id: str,
        reactor: Reactor,
        events: EventLog,
    ) -> None:
        self._config, self._folder, self._identity_path = config, folder, identity_path
        self._peer_id, self._reactor, self._events = peer_id, reactor, events
        self._daemon: Daemon | None = None
        self.p2p: Any = None
        self.port = 0
        """Where we listen; 0 in client mode."""

    def start(self, mode: Mode, bootstrap: list[str]) -> Presence:
        """Start the daemon; or start it again, as it cannot change how it listens while it runs."""
        if self._daemon is not None:
            self._reactor.run(self.p2p.shutdown(), timeout_s=5)
            self._daemon.stop()
        self._daemon = self._insist(mode, bootstrap)
        return self._reactor.run(self._connect(self._daemon, mode), timeout_s=30)

    def _insist(self, mode: Mode, bootstrap: list[str]) -> Daemon:
        """A daemon that does not reach anybody ends. Those it should reach answered us a moment ago, so they are busy,
        or start again themselves."""
        for attempt in range(CONNECT_ATTEMPTS - 1):
            try:
                return self._start_daemon(mode, bootstrap)
            except SwarmError as error:
                if error.code is not Code.UNREACHABLE:
                    raise
            time.sleep(2**attempt)
        return self._start_daemon(mode, bootstrap)

    def hide(self, bootstrap: list[str]) -> Presence:
        """Nobody can connect to us: be reached through a relay if that is wished and somebody relays, or not at all."""
        if self._config.use_relay:
            presence = self.start("relay", bootstrap)
            deadline = time.monotonic() + RELAY_TIMEOUT_S
            while time.monotonic() < deadline:
                self._reactor.run(presence.look())
                if presence.now()[0] == "relay":
                    return presence
                time.sleep(0.1)
        return self.start("client", bootstrap)

    def check_alive(self) -> None:
        """Raise if the daemon died under us, or we are deaf to it: without it nothing works any more."""
        if self._daemon is None:
            return
        control = self.p2p._client.control
        is_deaf = any(task is not None and task.done() for task in (control._read_task, control._write_task))
        if is_deaf or not self._daemon.is_alive():
            raise RunError(
                Code.DAEMON_FAILED,
                "The libp2p daemon of this peer ended unexpectedly.",
                fix="Start the peer again; it resumes from its state folder. If it repeats, check memory (dmesg).",
            )

    def stop(self) -> None:
        """Leave no process behind."""
        if self._daemon is not None:
            self._daemon.stop()

    def _start_daemon(self, mode: Mode, bootstrap: list[str]) -> Daemon:
        config = self._config
        wanted = self.port or (config.port if config.port is not None else (self._folder.read_port() or 0))
        hosts = config.host_maddrs or EVERYWHERE

        def start(port: int) -> Daemon:
            listen = []
            if mode != "client":
                # We choose the port, so that we know it whatever addresses are announced.
                self.port = _named_port(hosts) or port or free_port(hosts[0])
                listen = [_with_port(address, self.port) for address in hosts]
            return Daemon(
                identity=self._identity_path,
                listen=listen,
                announce=config.announce_maddrs,
                bootstrap=ipv4_if_any(bootstrap),
                client_mode=mode == "client",
                relays=bootstrap if mode == "relay" else (),
                is_relay=config.role == "aux",
            )

        port, attempts = wanted, 1 if config.port or _named_port(hosts) else PORT_ATTEMPTS
        while True:
            try:
                daemon = start(port)
                break
            except SwarmError as error:
                attempts -= 1
                if error.code is not Code.PORT_TAKEN or not attempts:
                    raise
                port = 0  # also a free port may be another's before our daemon listens on it
        if wanted and not port:
            self._events.write("port_changed", old=wanted, new=self.port)
        return daemon

    async def _connect(self, daemon: Daemon, mode: Mode) -> Presence:
        # Each peer keeps its sockets in its daemon's folder, which is removed with it.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{daemon.folder}/"
        self.p2p = await P2P.replicate(Multiaddr(daemon.control_address))
        self.p2p._client.control._pending_calls = OpenCalls()
        P2P.receive_raw_data = staticmethod(_receive_raw_data)
        config = self._config
        should_ask = config.role != "observer" and not config.announce_maddrs
        presence = Presence(self.p2p, self._peer_id, mode, should_ask, config.stays_direct)
        await presence.start()
        return presence


def _with_port(address: str, port: int) -> str:
    """`/ip4/0.0.0.0/tcp/0` listens on the wanted port; an address that names a port keeps it."""
    head, _, last = address.rpartition("/")
    return f"{head}/{port}" if last == "0" else address


def _named_port(addresses: Sequence[str]) -> int:
    """The first port that one of the addresses names; 0 if none does."""
    places = (host_and_port(address) for address in addresses)
    return next((place[1] for place in places if place is not None and place[1]), 0)


async def _receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    """hivemind 1.1.12 takes as many bytes as somebody says it will send, whatever that is."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return await reader.readexactly(length)
