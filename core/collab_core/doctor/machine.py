"""What this machine gives its processes: shared memory, open files, disk, memory."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from collab_core.doctor.check import BOTH, NONE, Check, Role

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 2**20  # hivemind cannot even be imported without some: its locks are there
MIN_FILES, GOOD_FILES = 256, 1024  # up to three per peer and direction, besides some hundred of Python's
MIN_DISK_BYTES = 64 * 2**20  # identity, event log, caches
SYSTEM_BYTES = 700 * 2**20
"""What a peer takes before it has a model: Python, torch and the daemon."""
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both versions: a container's limit, what it uses, and how much of that is files read before."""


def machine_checks(state_dir: Path) -> Iterator[Check]:
    """The quick ones: nothing here takes longer than a few milliseconds."""
    yield shared_memory()
    yield open_files()
    yield disk(state_dir, {"train": MIN_DISK_BYTES, "aux": MIN_DISK_BYTES})


def shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    """Whether some of it is to be had; promised space is worth nothing, so it is really taken for a moment."""
    name = "shared memory"
    if not folder.is_dir():
        return Check(name=name, ok=True, detail=f"this system has no {folder}, and needs none")
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, SHARED_BYTES)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            what = f"{folder} is full: {size(free)} of {size(total)} are free, and a peer needs {size(SHARED_BYTES)}"
        else:
            what = f"{folder} cannot be used: {error.strerror}"
        return Check(
            name=name,
            ok=False,
            detail=what,
            fix=f"See what fills it with `ls -lS {folder}` and remove what nobody uses, or make it larger: "
            f"`mount -o remount,size=1G {folder}` as root; for a container, `docker run --shm-size=1g`.",
            rules_out=BOTH,
        )
    return Check(name=name, ok=True, detail=f"{size(free)} of {size(total)} are free")


def open_files() -> Check:
    """Every connection is a file, in our process and in the daemon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} at once"
    if soft == resource.RLIM_INFINITY or soft >= GOOD_FILES:
        return Check(name="open files", ok=True, detail=told)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    more = "" if wanted >= GOOD_FILES else f" The system allows no more than {hard}: raise that in limits.conf first."
    return Check(
        name="open files",
        ok=False,
        detail=f"{told}, and a peer of a larger run needs {GOOD_FILES:,}",
        fix=f"In the shell you start from: `ulimit -n {wanted}`.{more}",
        rules_out=BOTH if soft < MIN_FILES else NONE,
    )


def disk(state_dir: Path, needs: dict[Role, int]) -> Check:
    """Whether a peer's folder has room for what its role keeps there."""
    place = next((path for path in (state_dir, *state_dir.parents) if path.is_dir()), Path("/"))
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    lacking = frozenset(role for role, need in needs.items() if free < need)
    words = ", ".join(f"{size(need)} to {role}" for role, need in needs.items() if role in lacking)
    if not os.access(place, os.W_OK):
        what, fix, lacking = f"{place} may not be written", "Give a folder of yours: --state-dir SOME/FOLDER", BOTH
    elif lacking:
        what = f"{size(free)} are free at {place}, and the run needs {words}"
        fix = f"Free some space at {place}, or keep this peer's files on another disk: --state-dir SOME/FOLDER"
    else:
        return Check(name="disk", ok=True, detail=f"{size(free)} are free at {place}")
    return Check(name="disk", ok=False, detail=what, fix=fix, rules_out=lacking)


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, of its container, and of its own limit."""
    left = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    for folder, limit, used, files in CGROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such limit, or it is the word "max"
            left.append(_left_in(folder, limit, used, files))
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            left.append(address_space - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(left))


def _left_in(folder: Path, limit: str, used: str, files: str) -> int:
    """Of a container's memory; what it holds of files is given back when it is needed."""
    facts = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
    return int((folder / limit).read_text()) - int((folder / used).read_text()) + int(facts[files])


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} bytes"
