"""What a process, or a host, has used so far."""

from __future__ import annotations

from pathlib import Path

import psutil


def cpu_seconds() -> float:
    """Of this process and of those it has started: the network daemon, and whatever an arm forks."""
    own = psutil.Process()
    return sum(_cpu_seconds(process) for process in (own, *own.children(recursive=True)))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:  # it has just ended
        return 0.0
    return float(used.user + used.system)


def sent_bytes(interface: str) -> int:
    """What left this host by one of its interfaces, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0
