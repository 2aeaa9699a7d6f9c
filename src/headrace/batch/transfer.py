"""The one way in which small host tensors reach the device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`; to CUDA through pinned memory, so that the host does not wait.

    torch's pinned allocator reuses a block only after the copy that read it has passed.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
