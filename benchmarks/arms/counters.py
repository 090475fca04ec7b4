"""What a process, or a host, has used so far."""

from __future__ import annotations

import resource
from pathlib import Path


def cpu_seconds() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sent_bytes(interface: str) -> int:
    """What left this host by one of its interfaces, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0
