"""Tiles of a matrix, by tensor descriptors (TMA) where its rows are aligned, else row by row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes, of addresses and rows that a tensor descriptor takes


def takes_tiles(x: Tensor) -> bool:
    """Whether a descriptor takes x [n, K]."""
    aligned = (x.stride(0) * x.element_size(), x.data_ptr())
    return all(value % ALIGNMENT == 0 for value in aligned)


def tiles_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [n, K] as tiles [rows, columns]; 0 past its ends."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


@triton.jit
def load_tile(tiles, lines, row, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of the rows at `lines`, columns from `start`, 0 past the end; by descriptor
    from `row` on."""
    if tiles is not None:
        tile = tiles.load([row, start])
    else:
        column = start + tl.arange(0, BLOCK)[None, :]
        if SIZE % BLOCK == 0:
            tile = tl.load(lines[:, None] + column)
        else:
            tile = tl.load(lines[:, None] + column, mask=column < SIZE, other=0.0)
    return tile
