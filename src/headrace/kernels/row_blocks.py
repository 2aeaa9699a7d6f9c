"""Products of rows in blocks of few sizes, each proven to give a row the same bits.

A library chooses code by the number of rows, and with it the order in which a row's products are
added: one row may come out otherwise alone than among many. It chooses by sizes alone, never by
what the numbers are, so a trial settles which sizes agree, if its numbers show the order of a sum.
Random ones do not where results are rounded to bfloat16: sums that differ in the last bits of
float32 differ in one result of ten thousand. `telling_factors` has sums that nearly cancel, of
which only rounding is left.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64)

Product = Callable[[Tensor], Tensor]
PATTERN = 64  # outputs that differ; the others repeat them
SPREAD = 6  # columns are scaled by powers of two up to this, so that most additions round


def telling_factors(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows [rows, inputs] and a weight [outputs, inputs] whose product shows the order of its sums.

    Columns come in pairs with opposite numbers in the rows. The even outputs have equal weights for
    both: what rounding leaves is their result. The odd ones are random.
    """
    weight = torch.randn(PATTERN, inputs, generator=draw)
    scale = torch.exp2(torch.randint(-SPREAD, SPREAD + 1, (inputs,), generator=draw).float())
    x = torch.randn(rows, inputs, generator=draw) * scale
    order = torch.randperm(inputs, generator=draw)
    one, other, left = order.tensor_split((inputs // 2, inputs // 2 * 2))
    x[:, other] = -x[:, one]
    weight[::2, other] = weight[::2, one]
    weight[::2, left] = 0
    repeats = -(-outputs // PATTERN)
    return x.to(dtype), weight.to(dtype).repeat(repeats, 1)[:outputs].contiguous()


def equal_blocks(product: Product, rows: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes in which a row has the same bits, at every place of a block.

    Each size is tried twice, with every row one place further on the second time. The largest size
    whose places agree is what the smaller ones must equal.

    Args:
        product: [m, ...] -> [m, ...], row by row, for the numbers m in `sizes`.
        rows: [n, ...] random numbers, n at least the largest of `sizes`.

    Returns: ascending; empty when in no size all places agree.
    """
    found: list[int] = []
    expected: Tensor | None = None
    for size in sorted(sizes, reverse=True):
        block = rows[:size]
        result = product(block.clone())
        moved = product(block.roll(1, 0)).roll(-1, 0)
        if not torch.equal(result, moved):
            continue
        if expected is None:
            expected = result
        if torch.equal(result, expected[:size]):
            found.append(size)
    return tuple(reversed(found))


def blocks_of(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cuts `count` rows: (rows that are there, rows of the block) for each, the last one filled up.

    Args:
        sizes: ascending.
    """
    largest = sizes[-1]
    while count > largest:
        yield largest, largest
        count -= largest
    if count > 0:
        yield count, next(size for size in sizes if size >= count)
