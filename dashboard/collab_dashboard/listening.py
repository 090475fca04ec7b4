"""Where the dashboard can be reached, and the thread it lives in."""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType

import uvicorn

from collab_core.errors import Code, ConfigError, SwarmError
from collab_dashboard.broadcast import MAX_CLIENTS
from collab_dashboard.server import make_app
from collab_dashboard.watch import RunWatch

EXAMPLE = "127.0.0.1:8420"
MAX_CONNECTIONS = 2 * MAX_CLIENTS + 50
MAX_HEARD_BYTES = 1024  # of what a browser says on the WebSocket; it has nothing to say
CLOSING_S = 2.0
_PLACE = re.compile(r"((\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]*)):)?(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A host and a port to listen on."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Place:
        """`HOST:PORT`, or `PORT` on this machine only; an IPv6 address stands in brackets.

        Raises:
            ConfigError: BAD_OPTION.
        """
        found = _PLACE.fullmatch(text.strip())
        if found is None or int(found["port"]) > 65535:
            raise ConfigError(
                Code.BAD_OPTION,
                f"{option} {text[:80]!r} is not a host and a port.",
                fix=f"Write it like {option} {EXAMPLE}, or {option} 0.0.0.0:8420 for everyone to see.",
            )
        return cls(found["six"] or found["name"] or "127.0.0.1", int(found["port"]))

    @property
    def is_local(self) -> bool:
        """Only programs on this machine can connect."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def bind(self, option: str) -> socket.socket:
        """Take the port, before anything else is begun.

        Raises:
            SwarmError: PORT_TAKEN or CANNOT_LISTEN.
        """
        try:
            kind, _, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            taken = socket.socket(kind, socket.SOCK_STREAM)
            try:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(address)
                taken.listen(MAX_CLIENTS)
            except OSError:
                taken.close()
                raise
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SwarmError(
                    Code.PORT_TAKEN,
                    f"The dashboard cannot listen on {self}: another program uses port {self.port}.",
                    fix=f"Choose another port: {option} {Place(self.host, min(self.port + 1, 65535))}",
                ) from error
            raise SwarmError(
                Code.CANNOT_LISTEN,
                f"The dashboard cannot listen on {self}: {error.strerror or error}.",
                fix=f"Give an address of this machine and a port from 1024: {option} {EXAMPLE}",
            ) from error
        return taken


class Dashboard:
    """Serves while the block lasts.

    Args:
        watches: the runs to show.
        taken: what `Place.bind` gave.
        is_local: only for this machine.
    """

    def __init__(self, watches: Sequence[RunWatch], taken: socket.socket, *, is_local: bool) -> None:
        self._socket = taken
        config = uvicorn.Config(
            make_app(watches, is_local=is_local),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="websockets-sansio",
            ws_max_size=MAX_HEARD_BYTES,
            ws_per_message_deflate=False,  # it would be done for everyone anew
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([taken],), name="collab-dashboard", daemon=True)

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        host, port = self._socket.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(CLOSING_S)
        self._socket.close()
