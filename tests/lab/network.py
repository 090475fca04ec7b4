"""Hosts on networks. The internet is a bridge in a namespace of its own; a home network hangs on it by a router."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from . import names

BURST_BYTES = 16 * 1024
QUEUE_MS = 100
PORT_STATES = {"cut": "0", "healed": "3"}  # disabled, forwarding
_lab_numbers = itertools.count(1)


def _command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(arguments)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Counters:
    """Bytes that went over a host's cable since it was plugged in, headers and acknowledgements included."""

    sent: int
    received: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


@dataclass(eq=False)
class Network:
    """A bridge with a subnet. `ip6` is empty where there is no IPv6, as in many homes."""

    lab: Lab
    namespace: str
    bridge: str
    ip4: str
    ip6: str = ""
    gateway: str = ""
    _next: Iterator[int] = field(default_factory=lambda: itertools.count(10))

    def __post_init__(self) -> None:
        self.lab.ip("-n", self.namespace, "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
        self.lab.ip("-n", self.namespace, "link", "set", self.bridge, "up")
        if self.gateway:
            self.lab.ip("-n", self.namespace, "addr", "add", f"{self.gateway}/24", "dev", self.bridge)

    def new_addresses(self) -> tuple[str, str]:
        """The next free IPv4 address, and an IPv6 address if the network has them."""
        number = next(self._next)
        return f"{self.ip4}.{number}", f"{self.ip6}::{number}" if self.ip6 else ""


class Host:
    """A machine with one cable. Everything run on it sees only this cable and its own loopback."""

    def __init__(self, lab: Lab, name: str, network: Network) -> None:
        self.lab, self.name = lab, name
        self.namespace = lab.add_namespace(name)
        self.ip, self.ip6 = "", ""
        self.plug(network)

    # --- cables and addresses ---

    def plug(self, network: Network) -> None:
        """Put the cable into a network, out of whichever it was in, and take an address there: the laptop moves."""
        if self.ip:
            self.lab.ip("-n", self.namespace, "link", "delete", "eth0")
        self.network, self._port = network, f"p{next(self.lab.port_numbers)}"
        end = ("peer", "name", "eth0", "netns", self.namespace)
        self.lab.ip("-n", network.namespace, "link", "add", self._port, "type", "veth", *end)
        self.lab.ip("-n", network.namespace, "link", "set", self._port, "master", network.bridge, "up")
        self.lab.ip("-n", self.namespace, "link", "set", "eth0", "up")
        self.ip, self.ip6 = "", ""
        self.change_address()

    def change_address(self) -> None:
        """A new address in the same network; the old one is gone at once, and with it what used it."""
        old = (self.ip, self.ip6)
        self.ip, self.ip6 = self.network.new_addresses()
        for address in filter(None, old):
            self.lab.ip("-n", self.namespace, "addr", "delete", f"{address}/{_prefix(address)}", "dev", "eth0")
        for address in filter(None, (self.ip, self.ip6)):
            nodad = ("nodad",) if ":" in address else ()
            self.lab.ip("-n", self.namespace, "addr", "add", f"{address}/{_prefix(address)}", "dev", "eth0", *nodad)
        if self.network.gateway:
            self.lab.ip("-n", self.namespace, "route", "replace", "default", "via", self.network.gateway)

    def limit(self, *, up_mbit: float | None = None, down_mbit: float | None = None) -> None:
        """Limit the rate of the cable; None lifts a limit."""
        for namespace, device, rate in (
            (self.namespace, "eth0", up_mbit),
            (self.network.namespace, self._port, down_mbit),
        ):
            if rate is None:
                subprocess.run(
                    ["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"], capture_output=True, check=False
                )
            else:
                burst = str(max(BURST_BYTES, int(rate * 1e6 / 8 / 100)))  # what a clock of 100 Hz needs
                shape = ("tbf", "rate", f"{rate}mbit", "burst", burst, "latency", f"{QUEUE_MS}ms")
                _command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def cut(self) -> None:
        """Nothing passes the cable any more, and nobody is told."""
        self._set_port("cut")

    def heal(self) -> None:
        self._set_port("healed")

    def _set_port(self, state: str) -> None:
        _command("bridge", "-n", self.network.namespace, "link", "set", "dev", self._port, "state", PORT_STATES[state])

    def counters(self) -> Counters:
        listed = json.loads(self.lab.ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0"))
        stats = listed[0]["stats64"]
        return Counters(stats["tx"]["bytes"], stats["rx"]["bytes"])

    # --- programs ---

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command to run it on this host. It becomes the command, so its process is the same."""
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *command: str, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, *command], capture_output=True, text=True, timeout=timeout_s, check=False, **options
        )

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self.prefix, *command], **options)


class Router(Host):
    """A home router: its LAN goes out through one public address, and nobody comes in unless a port is forwarded."""

    def __init__(self, lab: Lab, name: str, network: Network, lan_ip4: str) -> None:
        super().__init__(lab, name, network)
        self.lan = Network(lab, self.namespace, "lan", lan_ip4, gateway=f"{lan_ip4}.1")
        self.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward").check_returncode()
        for rule in (
            "-P FORWARD DROP",
            "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            "-A FORWARD -i lan -j ACCEPT",  # out; and among themselves, if bridged packets come by here
            "-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT",
            "-A INPUT -i eth0 -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP",
            "-t nat -A POSTROUTING -o eth0 -j MASQUERADE",
        ):
            self._iptables(rule)

    def forward(self, port: int, host: Host) -> None:
        """Send what comes to a port of the public address to a host at home."""
        self._iptables(f"-t nat -A PREROUTING -i eth0 -p tcp --dport {port} -j DNAT --to-destination {host.ip}:{port}")

    def _iptables(self, rule: str) -> None:
        done = self.run("iptables", "-w", *rule.split())
        if done.returncode:
            raise RuntimeError(f"`iptables {rule}` failed on {self.name}: {done.stderr.strip()}")


class Lab:
    """One small internet. It is gone when the block ends, when the process ends, and when the process is killed."""

    def __init__(self) -> None:
        if reason := names.missing():
            raise RuntimeError(reason)
        names.sweep()
        self._prefix = f"{names.owner(os.getpid())}-{next(_lab_numbers)}"
        self.port_numbers = itertools.count(1)
        self._lan_numbers = itertools.count(1)
        # A child that sees our end of the pipe close, however we end. A session of its own: Ctrl-C is not for it.
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", str(Path(names.__file__)), self._prefix],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.close)
        # Addresses that are public, as in life: reserved ones are treated as private by many programs.
        self.internet = Network(self, self.add_namespace("internet"), "internet", "45.83.7", "2a0c:5a80:77")

    def host(self, name: str, where: Router | None = None) -> Host:
        """A machine on the internet, or at home behind a router."""
        return Host(self, name, where.lan if where else self.internet)

    def router(self, name: str, *, lan_ip4: str = "") -> Router:
        """A home with NAT. Homes are alike: two of them may well use the same private addresses."""
        return Router(self, name, self.internet, lan_ip4 or f"192.168.{next(self._lan_numbers)}")

    def add_namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        self.ip("netns", "add", namespace)
        self.ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    @staticmethod
    def ip(*arguments: str) -> str:
        return _command("ip", *arguments)

    def close(self) -> None:
        """Remove everything. Safe to call twice."""
        atexit.unregister(self.close)
        for namespace in names.namespaces(self._prefix):
            names.remove(namespace)
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prefix(address: str) -> int:
    return 64 if ":" in address else 24
