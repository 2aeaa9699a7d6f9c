"""Memory of the machine, as Linux tells it: all of it, and what is left."""

import os
from collections.abc import Mapping
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path) -> int | None:
    """`MemAvailable` of a file like /proc/meminfo, in bytes."""
    if not meminfo.exists():
        return None
    kibibytes = numbers_of(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def available_container_bytes(cgroup: Path) -> int | None:
    """What the memory limit of a cgroup v2 folder leaves, in bytes; `None` without a limit."""
    limit = container_limit(cgroup)
    if limit is None:
        return None
    used = int((cgroup / "memory.current").read_text())
    statistics = numbers_of(cgroup / "memory.stat")
    # page cache is given up under pressure, except what lies in shared memory
    reclaimable = statistics.get("file", 0) - statistics.get("shmem", 0)
    return max(0, limit - used + reclaimable)


def total_host_bytes(meminfo: Path, cgroup: Path) -> int:
    """Memory of the machine, or the container's limit (cgroup v2) where that is less."""
    if meminfo.exists():
        total = numbers_of(meminfo)["MemTotal:"] * 1024
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = container_limit(cgroup)
    return total if limit is None else min(total, limit)


def container_limit(cgroup: Path) -> int | None:
    """The memory limit of a cgroup v2 folder in bytes; `None` without one."""
    file = cgroup / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def numbers_of(file: Path) -> Mapping[str, int]:
    """Name -> number of a file of such lines, a colon and all."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
