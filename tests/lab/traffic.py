"""Small programs that run on hosts: something to connect to, and something that connects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .network import Host

CONNECT_TIMEOUT_S = 1.5

SERVER = """
import socket, socketserver, sys
class Count(socketserver.BaseRequestHandler):
    def handle(self):
        while self.request.recv(65536): pass
        self.request.sendall(b"!")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = Server((sys.argv[1], int(sys.argv[2])), Count)
print("ready", flush=True)
server.serve_forever()
"""

CLIENT = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[4])) as link:
    link.settimeout(30)
    link.sendall(bytes(int(sys.argv[3])))
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b"!"
print(time.monotonic() - start)
"""


def _start(host: Host, *arguments: str) -> None:
    """Start a program that says when it is ready; it ends with the lab."""
    process = host.start(sys.executable, *arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"ready\n"


def serve_bytes(host: Host, port: int, family: str = "0.0.0.0") -> None:
    """Take whatever comes, and say when all of it is there."""
    _start(host, "-S", "-c", SERVER, family, str(port))


def seconds_to_send(host: Host, to: str, port: int, num_bytes: int, timeout_s: float = 10) -> float:
    """Connect, send, and wait until everything has arrived."""
    done = host.run(sys.executable, "-S", "-c", CLIENT, to, str(port), str(num_bytes), str(timeout_s))
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def can_connect(host: Host, to: str, port: int) -> bool:
    done = host.run(sys.executable, "-S", "-c", CLIENT, to, str(port), "1", str(CONNECT_TIMEOUT_S))
    assert done.returncode == 0 or "TimeoutError" in done.stderr or "OSError" in done.stderr or "Refused" in done.stderr
    return done.returncode == 0


def start_proxy(host: Host, port: int, to: Host, to_port: int, *, delay_ms: float = 0, loss: float = 0) -> None:
    _start(
        host,
        str(Path(__file__).parent / "proxy.py"),
        *("--listen", f"0.0.0.0:{port}", "--to", f"{to.ip}:{to_port}"),
        *("--delay-ms", str(delay_ms), "--loss", str(loss)),
    )
