"""Rotary position embedding (Su et al., 2021), half-split form: dimension i turns with i + R/2."""

from functools import cached_property

import torch
from torch import Tensor, nn

from headrace.config.plan import RopePlan
from headrace.layers.rope_frequencies import rope_frequencies
from headrace.layers.weights import WeightSpace


class Rotation:
    """Angles of the tokens of a step, shared by the layers; gathered when torch first needs them.

    Args:
        cache: [length, R] float32, cos and then sin of each position.
        positions: [T] int64.
    """

    def __init__(self, cache: Tensor, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """[T, 1, R] float32 each; the first half of sin is negated, so that a rotation is
        x * cos + (x with its halves swapped) * sin."""
        cos, sin = self.cache.index_select(0, self.positions).chunk(2, dim=-1)  # [T, R / 2] each
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    @cached_property
    def matrix(self) -> Tensor:
        """The rotation of the step's only token as a matrix, [R, R] float32: x @ matrix."""
        cos, sin = (part.view(-1) for part in self.cos_sin)
        half = len(cos) // 2
        index = torch.arange(half, device=cos.device)
        matrix = torch.diag(cos)
        matrix[index + half, index] = sin[:half]
        matrix[index, index + half] = sin[half:]
        return matrix

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first R dimensions of each head, in float32: [T, N, D] -> [T, N, D]."""
        cos, sin = self.cos_sin
        rotary = cos.shape[-1]
        head = x if rotary == x.shape[-1] else x[..., :rotary]
        first, second = head.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        turned = (head * cos + swapped * sin).to(x.dtype)
        return turned if head is x else torch.cat((turned, x[..., rotary:]), dim=-1)


class RotaryEmbedding(nn.Module):
    """Table of cos and sin for the positions 0 .. plan.length - 1."""

    cache: Tensor

    def __init__(self, plan: RopePlan, *, space: WeightSpace) -> None:
        super().__init__()
        self.plan = plan
        frequencies, attention_factor = rope_frequencies(plan)
        positions = torch.arange(plan.length, dtype=torch.float32)
        angles = positions[:, None] * frequencies[None]  # [length, R / 2]
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        cache = space.arena.allocate("rope", table.shape, torch.float32, zero=False)
        self.register_buffer("cache", cache.copy_(table), persistent=False)  # [length, R]

    def forward(self, positions: Tensor) -> Rotation:
        """[T] int64, below plan.length."""
        return Rotation(self.cache, positions)
