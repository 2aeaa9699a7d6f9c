"""Rows sorted by group, some groups without any, and their products one group after another."""

from dataclasses import dataclass

import torch
from fused_cases import DEVICE, draw
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """counts: rows of each group."""

    counts: tuple[int, ...]
    outputs: int
    inputs: int

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight, ends."""
        rows, groups = sum(self.counts), len(self.counts)
        x = draw(rows, self.inputs, dtype=dtype, seed=0)
        weight = draw(
            groups, self.outputs, self.inputs, dtype=dtype, seed=1, scale=self.inputs**-0.5
        )
        ends = torch.tensor(self.counts).cumsum(0).to(DEVICE, torch.int32)
        return x, weight, ends

    def expected(self, x: Tensor, weight: Tensor) -> Tensor:
        """[R, N] float64."""
        parts = x.double().split(list(self.counts))
        return torch.cat(
            [part @ matrix.double().T for part, matrix in zip(parts, weight, strict=True)]
        )


CASES = (
    Grouped(counts=(3, 0, 17, 1, 0), outputs=96, inputs=64),
    Grouped(counts=(0, 0, 0, 5), outputs=30, inputs=44),  # neither whole tiles nor whole blocks
    Grouped(counts=(130, 2, 70), outputs=65, inputs=72),  # tiles of many rows
    Grouped(counts=(0, 0), outputs=8, inputs=8),
    Grouped(counts=(19,), outputs=8, inputs=8),
)
