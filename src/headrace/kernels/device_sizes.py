"""What a device has that the programs of kernels are sized by."""

from functools import cache

import torch

HOPPER = (9, 0)
"""Compute capability of the GPUs that measured settings are for."""
HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that a block of theirs may have."""
H200_MULTIPROCESSORS = 132
H200_SHARED = 225 * 1024
"""Bytes of shared memory that the blocks on one multiprocessor divide."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 on the CPU, where the interpreter runs alone."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on `device`; the interpreter has none."""
    if device.type == "cpu":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def takes_measured_settings(device: torch.device) -> bool:
    """Whether what was measured on Hopper holds for `device`: other GPUs have less shared memory,
    or other instructions. The interpreter, on a CPU, does as Hopper does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER
