"""Linear layers: a matrix, or several matrices of the checkpoint merged into one product.

How a product is computed from stored weights is a `WeightFormat`, so that packed formats (fp8,
int4, GGUF blocks) can come without another linear layer.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from headrace.layers.weights import WeightSlot, WeightSpace, sibling


class WeightFormat(Protocol):
    """How the weights of a linear layer are kept and multiplied."""

    def create(self, space: WeightSpace, outputs: int, inputs: int) -> nn.Parameter:
        """Memory for a matrix [outputs, inputs]."""
        ...

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, inputs] -> [T, outputs] in x's dtype."""
        ...


class DenseFormat:
    """Every weight in the model's dtype, row-major [outputs, inputs] as in the checkpoint."""

    def create(self, space: WeightSpace, outputs: int, inputs: int) -> nn.Parameter:
        return space.parameter(outputs, inputs)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


DENSE = DenseFormat()


class MergedLinear(nn.Module):
    """Matrices that share an input, stacked: one product in place of several.

    Args:
        inputs: size of the input.
        parts: checkpoint name of each part -> its output size, in the order of the output.
        bias: every part has a bias.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        space: WeightSpace,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        outputs = sum(self.parts.values())
        self.weight_format = weight_format
        self.weight = weight_format.create(space, outputs, inputs)
        self.bias = space.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, sum of parts]"""
        return self.weight_format.apply(x, self.weight, self.bias)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        start = 0
        for part, size in self.parts.items():
            name = sibling(path, part)
            yield WeightSlot(name=f"{name}.weight", destination=self.weight[start : start + size])
            if self.bias is not None:
                yield WeightSlot(name=f"{name}.bias", destination=self.bias[start : start + size])
            start += size


class Linear(MergedLinear):
    """One matrix, stored under the layer's own name."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        space: WeightSpace,
        weight_format: WeightFormat = DENSE,
    ) -> None:
        super().__init__(inputs, {"": outputs}, bias=bias, space=space, weight_format=weight_format)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name=f"{path}.weight", destination=self.weight)
        if self.bias is not None:
            yield WeightSlot(name=f"{path}.bias", destination=self.bias)
