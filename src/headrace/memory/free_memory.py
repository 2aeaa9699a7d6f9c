"""How much memory a device has left, as far as the system tells."""

import torch

from headrace.memory.host_memory import (
    CGROUP,
    MEMINFO,
    available_container_bytes,
    available_host_bytes,
)


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
