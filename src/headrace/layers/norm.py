"""Root-mean-square norm (Zhang & Sennrich, 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace.layers.weights import WeightSlot, WeightSpace


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + stored weight), computed in float32.

    Args:
        size: last dimension.
        offset: what the stored weights deviate from: 0, or 1 in Gemma. The sum is kept in float32
            when there is an offset, since 1 + w would lose the small w in bfloat16.
    """

    def __init__(self, size: int, *, eps: float, space: WeightSpace, offset: float = 0.0) -> None:
        super().__init__()
        self.shape, self.eps, self.offset = (size,), eps, offset
        self.operators, self.dtype = space.operators, space.dtype  # dtype: of the rows
        self.weight = space.parameter(size, dtype=torch.float32 if offset else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        return self.operators.norm(self, x)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name=f"{path}.weight", destination=self.weight, offset=self.offset)
