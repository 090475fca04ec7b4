"""Names of namespaces say who made them, so that what a killed process left behind can be told from what is in use.

Only the standard library: the reaper, which runs this file as a script, must start at once and never fail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PREFIX = "collab-lab"
FOLDER = Path("/run/netns")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "iptables": "iptables"}


def missing() -> str:
    """Why there can be no lab here; empty if there can."""
    if sys.platform != "linux":
        return "the lab needs Linux (network namespaces)"
    if os.geteuid() != 0:
        return "the lab needs root to make network namespaces: sudo make test"
    if packages := {package for tool, package in TOOLS.items() if shutil.which(tool) is None}:
        return f"the lab needs {', '.join(sorted(packages))}: apt-get install {' '.join(sorted(packages))}"
    return ""


def owner(pid: int) -> str:
    """A process as part of a name: its number and, as numbers are used again, when it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{PREFIX}-{pid}-{fields[19]}"


def namespaces(prefix: str = PREFIX) -> list[str]:
    """Namespaces whose name begins so."""
    return sorted(path.name for path in FOLDER.glob(f"{prefix}-*"))


def is_orphan(namespace: str) -> bool:
    """Whether the process that made it is gone."""
    pid = namespace.removeprefix(f"{PREFIX}-").partition("-")[0]
    try:
        return not namespace.startswith(f"{owner(int(pid))}-")
    except (OSError, ValueError):
        return True


def remove(namespace: str) -> None:
    """End the processes in a namespace, then the namespace; its links and rules go with it."""
    for _ in range(2):  # a second time for what was being started meanwhile
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def sweep() -> None:
    """Remove what labs of dead processes left behind."""
    for namespace in namespaces():
        if is_orphan(namespace):
            remove(namespace)


def reap() -> None:
    """Wait until our parent closes the pipe, which it also does by dying, then clean up after it."""
    sys.stdin.buffer.read()
    for namespace in namespaces(sys.argv[1]):
        remove(namespace)


if __name__ == "__main__":
    reap()
