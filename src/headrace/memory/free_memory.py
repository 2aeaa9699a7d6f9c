"""How much memory a device has left, as far as the system tells."""

from collections.abc import Mapping
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, or `None` where the system does not say.

    On a CPU that is what the kernel calls available (page cache that it would give up counts as
    free), and no more than the container's limit leaves (cgroup v2).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        known = (available_host_bytes(MEMINFO), available_container_bytes(CGROUP))
        return min((number for number in known if number is not None), default=None)
    return None


def available_host_bytes(meminfo: Path) -> int | None:
    """`MemAvailable` of a file like /proc/meminfo, in bytes."""
    if not meminfo.exists():
        return None
    kibibytes = _numbers(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def available_container_bytes(cgroup: Path) -> int | None:
    """What the memory limit of a cgroup v2 folder leaves, in bytes; `None` without a limit."""
    limit_file = cgroup / "memory.max"
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit == "max":
        return None
    used = int((cgroup / "memory.current").read_text())
    statistics = _numbers(cgroup / "memory.stat")
    # page cache is given up under pressure, except what lies in shared memory
    reclaimable = statistics.get("file", 0) - statistics.get("shmem", 0)
    return max(0, int(limit) - used + reclaimable)


def _numbers(file: Path) -> Mapping[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
