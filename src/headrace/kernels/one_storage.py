"""Tensors side by side in one piece of memory, so that one copy takes all of them elsewhere."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: kernels take wide loads from there


def one_storage(
    device: torch.device, *wanted: tuple[torch.dtype, Sequence[int]], zeroed: bool = False
) -> list[Tensor]:
    """A tensor of each dtype and shape, contiguous, at multiples of 16 bytes of one storage."""
    sizes = [dtype.itemsize * prod(shape) for dtype, shape in wanted]
    spans = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    make = torch.zeros if zeroed else torch.empty
    whole = make(sum(spans), dtype=torch.uint8, device=device)
    pieces = whole.split_with_sizes(spans)
    return [
        piece[:size].view(dtype).view(tuple(shape))
        for piece, size, (dtype, shape) in zip(pieces, sizes, wanted, strict=True)
    ]
