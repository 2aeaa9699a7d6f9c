"""Which block sizes give a row the same bits is found by trial, faults of every kind included."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.row_blocks import BLOCK_ROWS, blocks_of, equal_blocks, telling_factors

WEIGHT = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(64, 40, generator=torch.Generator().manual_seed(2))


def one_by_one(rows: Tensor) -> Tensor:
    return torch.cat([row[None] @ WEIGHT for row in rows])


def backwards(rows: Tensor) -> Tensor:
    """The same sums in another order."""
    return torch.cat([row.flip(0)[None] @ WEIGHT.flip(0) for row in rows])


def backwards_alone(rows: Tensor) -> Tensor:
    return backwards(rows) if len(rows) == 1 else one_by_one(rows)


def backwards_in_front(rows: Tensor) -> Tensor:
    """What a kernel for the last rows of a block may do, from blocks of 8 on."""
    if len(rows) < 8:
        return one_by_one(rows)
    return torch.cat((backwards(rows[:3]), one_by_one(rows[3:])))


def place_added(rows: Tensor) -> Tensor:
    places = torch.arange(len(rows))[:, None]
    return one_by_one(rows) + places * 1e-3


def test_sizes_that_agree_are_found() -> None:
    assert equal_blocks(one_by_one, ROWS, BLOCK_ROWS) == BLOCK_ROWS
    assert equal_blocks(backwards_alone, ROWS, BLOCK_ROWS) == BLOCK_ROWS[1:]
    assert equal_blocks(backwards_in_front, ROWS, BLOCK_ROWS) == (1, 2, 4)
    assert equal_blocks(place_added, ROWS, BLOCK_ROWS) == (1,)
    assert equal_blocks(place_added, ROWS, BLOCK_ROWS[1:]) == ()


@pytest.mark.parametrize("inputs", [2, 64, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_a_sum_shows_in_what_is_rounded(dtype: torch.dtype, inputs: int) -> None:
    draw = torch.Generator().manual_seed(3)
    rows, weight = telling_factors(64, 80, inputs, dtype, draw)
    assert (rows.shape, weight.shape) == ((64, inputs), (80, inputs))
    assert rows.dtype is weight.dtype is dtype

    def product(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 80)
        for column in reversed(range(inputs)) if len(x) == 1 else range(inputs):
            total = total + x[:, column, None].float() * weight[:, column].float()
        return total.to(dtype)

    agreeing = BLOCK_ROWS if inputs == 2 else BLOCK_ROWS[1:]  # a + b is b + a
    assert equal_blocks(product, rows, BLOCK_ROWS) == agreeing


@pytest.mark.parametrize("sizes", [BLOCK_ROWS, (1,), (2, 16), (64,)])
def test_blocks_cover_every_number_of_rows(sizes: tuple[int, ...]) -> None:
    for count in (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 200):
        blocks = list(blocks_of(count, sizes))
        assert sum(live for live, _ in blocks) == count
        assert all(0 < live <= size and size in sizes for live, size in blocks)
        assert all(live == size for live, size in blocks[:-1])
