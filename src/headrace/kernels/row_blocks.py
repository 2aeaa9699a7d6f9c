"""Products of rows in blocks of few sizes, each proven to give a row the same bits.

A library chooses code by the number of rows, and with it the order in which a row's products are
added: one row may come out otherwise alone than among many. It chooses by sizes alone, never by
what the numbers are, so a trial settles which sizes agree: where sums were made in another order,
random numbers differ in their last bits in most of the outputs.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64)

Product = Callable[[Tensor], Tensor]


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
