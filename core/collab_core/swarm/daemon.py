"""The libp2p daemon that comes with hivemind, started by us: its faults become words, its end is certain."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from collab_core.errors import Code, SwarmError
from collab_core.swarm.addresses import host_and_port

STARTUP_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 2.0
SOCKET_PREFIX = "collab-"
ENVIRONMENT = {
    "GOLOG_LOG_LEVEL": "error",
    # By default it dials from the port it listens on. Two peers that dial each other at the same moment then share one
    # TCP connection, both handshakes fail, and both try again at the same moment.
    "LIBP2P_TCP_REUSEPORT": "false",
}
RELAY_SERVICE = {
    "relayService": "1",
    "forceReachabilityPublic": "1",  # otherwise it relays only once enough strangers found it public
    # With p2pd's own buffer of 16 MiB a relayed connection breaks after about 100 kB; measured with 64 KiB: 60 MB/s
    "relayBufferSize": str(2**16),
    "relayDataLimit": str(2**40),
    "relayTimeLimit": "720h",
    "relayMaxCircuits": "256",
}
MAX_BASE_LENGTH = 50  # a Unix socket's whole path has to fit in 104 characters, and ours adds about 50


def _socket_base() -> Path:
    """The temporary folder, unless its path is too long for sockets in it."""
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) <= MAX_BASE_LENGTH else Path("/tmp")


def _remove_stale_sockets() -> None:
    """Socket folders of peers that were killed: the process number in the name tells whose they were."""
    for folder in _socket_base().glob(f"{SOCKET_PREFIX}[0-9]*-*"):
        owner = folder.name.removeprefix(SOCKET_PREFIX).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError, OverflowError):
            continue


def free_port(address: str) -> int:
    """A port that is free now at an address to listen on."""
    try:
        with _listener(address, 0) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise SwarmError(
            Code.DAEMON_FAILED,
            f"This machine cannot listen on {address}: {error.strerror or error}.",
            fix="Give an address of this machine with --host-maddrs, or /ip4/0.0.0.0/tcp/0 for all of them.",
        ) from error


def is_free(address: str, port: int) -> bool:
    """Whether nobody listens on a port now."""
    try:
        _listener(address, port).close()
    except OSError:
        return False
    return True


def _check_ports(listen: Sequence[str]) -> None:
    """The daemon is content if it can listen on one of its addresses, and who calls the other then reaches somebody
    else. So we ask the kernel first."""
    for address in listen:
        place = host_and_port(address)
        if place is not None and place[1]:
            try:
                _listener(address, place[1]).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise _port_taken(address) from error


def _listener(address: str, port: int) -> socket.socket:
    place = host_and_port(address)
    host = place[0] if place else "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last time may linger
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _port_taken(where: str) -> SwarmError:
    return SwarmError(
        Code.PORT_TAKEN,
        f"Another program, perhaps another peer of yours, already listens on {where}.",
        fix="Stop it, or choose another port with --port (0 takes any free one).",
    )


class Daemon:
    """One running p2pd.

    It has a session of its own, so a Ctrl-C in the terminal reaches us and not it: we still need it to say goodbye.
    When we are killed it sees its control connection close and exits by itself.
    """

    def __init__(
        self,
        *,
        identity: Path,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        client_mode: bool = False,
        relays: Sequence[str] = (),
        is_relay: bool = False,
    ) -> None:
        """Start it.

        Args:
            identity: file of the peer's key.
            listen: addresses to listen on.
            announce: addresses to tell others instead of those the daemon finds itself.
            bootstrap: peers to connect to; one of them must answer.
            client_mode: do not listen at all.
            relays: peers through which others reach us.
            is_relay: let others be reached through us.
        """
        if not client_mode:
            _check_ports(listen)
        _remove_stale_sockets()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{SOCKET_PREFIX}{os.getpid()}-", dir=_socket_base()))
        arguments = {
            "listen": f"/unix{self.folder}/daemon.sock",
            "id": str(identity),
            "dhtClient" if client_mode else "dhtServer": "1",
            "connManager": "1",
            "idleTimeout": "15s",
            "relay": "1",  # everyone must be able to dial those who are behind a relay
            "relayService": "0",
            "tls": "1",
        }
        if is_relay:
            arguments |= RELAY_SERVICE
        if relays:
            arguments |= {
                "autoRelay": "1",
                "relayDiscovery": "0",
                "trustedRelays": ",".join(relays),
                "forceReachabilityPrivate": "1",  # or it would first wait for its own findings
            }
        if client_mode:
            arguments["noListenAddrs"] = "1"
        else:
            arguments["hostAddrs"] = ",".join(listen)
        if announce:
            arguments["announceAddrs"] = ",".join(announce)
        if bootstrap:
            arguments |= {"b": "1", "bootstrapPeers": ",".join(bootstrap)}
        self._lines: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()
        try:
            with as_file(files("hivemind.hivemind_cli") / "p2pd") as binary:
                self._process = subprocess.Popen(
                    [str(binary), *(f"-{key}={value}" for key, value in arguments.items())],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, **ENVIRONMENT},
                )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise SwarmError(
                Code.DAEMON_FAILED,
                f"The libp2p daemon could not be started: {error}.",
                fix="Reinstall it: pip install --force-reinstall hivemind",
            ) from error
        self._reader = threading.Thread(target=self._read, name="collab-daemon-output", daemon=True)
        self._reader.start()
        try:
            self._ready.wait(STARTUP_TIMEOUT_S)
            if not self._ready.is_set() or self._process.poll() is not None:
                raise self._failure(listen)
        except BaseException:
            self.stop()
            raise

    @property
    def control_address(self) -> str:
        return f"/unix{self.folder}/daemon.sock"

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").strip()
            self._lines.append(line)
            if line.startswith("Peer ID:"):
                self._ready.set()
        self._process.wait()
        self._ready.set()  # it ended: whoever waits for the start must look

    def _failure(self, listen: Sequence[str]) -> SwarmError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        said = " / ".join(self._lines) or "nothing"
        if "address already in use" in said:
            return _port_taken(", ".join(listen))
        if "bootstrap" in said:
            return SwarmError(
                Code.UNREACHABLE,
                "The first peers answer, but none of them is the peer the invite names; or it left at this moment.",
                fix="Try again in a minute. If it stays like this, ask the organiser for a fresh invite.",
            )
        return SwarmError(
            Code.DAEMON_FAILED,
            f"The libp2p daemon did not start. It said: {said}",
            fix="Check --host-maddrs and --announce-maddrs; `collab train --help` shows their form.",
        )

    def stop(self) -> None:
        """End the daemon, the hard way if it does not listen, and remove its sockets."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
