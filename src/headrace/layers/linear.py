"""Linear layers: a matrix, or several matrices of the checkpoint merged into one product.

How the product is computed from stored weights is the `WeightFormat`'s affair.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from headrace.layers.weights import WeightSlot, WeightSpace, sibling


class MergedLinear(nn.Module):
    """Matrices that share an input, stacked: one product in place of several.

    Args:
        inputs: size of the input.
        parts: checkpoint name of each part -> its output size, in the order of the output.
        bias: every part has a bias.
    """

    weight: nn.Parameter | None

    def __init__(
        self, inputs: int, parts: Mapping[str, int], *, bias: bool, space: WeightSpace
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        outputs = sum(self.parts.values())
        self.format = space.format
        self.weight = self.format.create(space, outputs, inputs)
        self.bias = space.parameter(outputs) if bias else None
        self.finished: Tensor | None = None

    def forward(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, sum of parts], plus `addend`"""
        weight = self.weight if self.finished is None else self.finished
        assert weight is not None
        return self.format.apply(x, weight, self.bias, addend)

    def finish(self) -> None:
        """The loaded matrix in the form of its format; the loaded one is freed if it differs."""
        assert self.weight is not None, "finished before"
        finished = self.format.finish(self.weight)
        if finished is not self.weight:
            self.finished, self.weight = finished, None

    def slots(self, path: str) -> Iterator[WeightSlot]:
        assert self.weight is not None, "the loaded form is gone once it is finished"
        start = 0
        for part, size in self.parts.items():
            name = sibling(path, part)
            yield WeightSlot(name=f"{name}.weight", destination=self.weight[start : start + size])
            if self.bias is not None:
                yield WeightSlot(name=f"{name}.bias", destination=self.bias[start : start + size])
            start += size


class Linear(MergedLinear):
    """One matrix, stored under the layer's own name."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, space: WeightSpace) -> None:
        super().__init__(inputs, {"": outputs}, bias=bias, space=space)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        assert self.weight is not None, "the loaded form is gone once it is finished"
        yield WeightSlot(name=f"{path}.weight", destination=self.weight)
        if self.bias is not None:
            yield WeightSlot(name=f"{path}.bias", destination=self.bias)
