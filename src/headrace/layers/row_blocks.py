"""A weight format that gives a row the same bits whatever rows are beside it."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.base.decision import Decision
from headrace.base.errors import UnsupportedError
from headrace.kernels.row_blocks import BLOCK_ROWS, blocks_of, equal_blocks, telling_factors
from headrace.layers.weight_formats import WeightFormat

if TYPE_CHECKING:
    from headrace.layers.weights import WeightSpace

SEED = 20261129  # of the numbers that are tried
BIAS_SCALE = 2.0**-20  # of the size of what rounding leaves, so that it does not hide it


class RowBlockFormat:
    """Another format's weights, multiplied by blocks of rows of proven sizes.

    Every shape of a weight is tried when the first weight of it is finished, with the threads of
    that time. A model in use must be finished.

    Args:
        inner: keeps the weights and makes the products.
        dtype: of the rows.
    """

    def __init__(self, inner: WeightFormat, dtype: torch.dtype) -> None:
        self.name, self._inner, self._dtype = inner.name, inner, dtype
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def create(self, space: "WeightSpace", outputs: int, inputs: int) -> nn.Parameter:
        return self._inner.create(space, outputs, inputs)

    def finish(self, weight: Tensor) -> Tensor:
        """Raises `UnsupportedError` where no size of a block gives a row the same bits at every
        place."""
        shape = tuple(weight.shape)
        if shape not in self._sizes:
            self._sizes[shape] = self._proven(shape)
        return self._inner.finish(weight)

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None
    ) -> Tensor:
        sizes = self._sizes[tuple(weight.shape)]
        parts, start = [], 0
        for live, size in blocks_of(x.shape[0], sizes):
            block = x[start : start + live]
            if live < size:
                block = F.pad(block, (0, 0, 0, size - live))
            parts.append(self._inner.apply(block, weight, bias)[:live])
            start += live
        product = (
            parts[0] if len(parts) == 1 else torch.cat([x.new_empty(0, weight.shape[0]), *parts])
        )
        return product if addend is None else addend + product

    @property
    def decision(self) -> Decision[tuple[int, ...]]:
        """Sizes that serve every weight so far."""
        common = set(BLOCK_ROWS).intersection(*self._sizes.values())
        return Decision(
            name="row_blocks",
            value=tuple(sorted(common)),
            reason=f"measured: a row has the same bits in each, at every place, for all "
            f"{len(self._sizes)} shapes of weights, with {torch.get_num_threads()} threads",
        )

    def _proven(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        draw = torch.Generator().manual_seed(SEED)
        outputs, inputs = shape
        rows, weight = telling_factors(BLOCK_ROWS[-1], outputs, inputs, self._dtype, draw)
        finished = self._inner.finish(weight)
        bias = (torch.randn(outputs, generator=draw) * BIAS_SCALE).to(self._dtype)
        found = set(BLOCK_ROWS)
        for each in (None, bias):
            product = partial(self._inner.apply, weight=finished, bias=each)
            found &= set(equal_blocks(product, rows, BLOCK_ROWS))
        if not found:
            raise UnsupportedError(
                "deterministic cannot be honoured on this CPU",
                why=f"the library's products with a weight {list(shape)} depend on a row's place",
                remedy="leave deterministic off, or try fewer threads (OMP_NUM_THREADS)",
            )
        return tuple(sorted(found))
