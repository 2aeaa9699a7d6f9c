"""Root-mean-square norm (Zhang & Sennrich, 2019)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
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
        self.weight = space.parameter(size, dtype=torch.float32 if offset else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        if x.dtype is self.weight.dtype:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum): the step between two sublayers."""
        total = residual + x
        return self(total), total

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name=f"{path}.weight", destination=self.weight, offset=self.offset)
