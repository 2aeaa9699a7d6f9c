"""Products of rows with the matrix of their group in Triton. Meaning: `grouped_product`.

Which rows belong to which group is known to the device alone, so the grid is as large as any
division of the rows could need: a program finds its group by counting the tiles of those before it,
and ends at once where there is none. Nothing waits for the host, so that it can be captured.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.fused_math_triton import check_fused, next_power

FEW, MANY = 16, 64  # rows of a tile
COLUMNS = 64


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product.grouped_product`; float32 operands are not rounded.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("The grouped product", x, pdl=False)
    rows, inputs = x.shape
    groups, outputs = weight.shape[:2]
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    assert weight.shape[2] == inputs
    assert ends.shape == (groups,)
    assert ends.dtype is torch.int32
    assert x.stride(1) == 1
    out = x.new_empty(rows, outputs)
    if rows == 0:
        return out
    tile = FEW if rows <= FEW * groups else MANY
    most = min(rows, groups) + rows // tile  # tiles, if every group ends within one
    block = 32 if x.dtype is torch.float32 else 64
    _grouped_kernel[(triton.cdiv(outputs, COLUMNS), most)](
        x,
        weight,
        ends,
        out,
        x.stride(0),
        GROUPS=groups,
        GROUPS_PAD=next_power(groups),
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=tile,
        COLUMNS=COLUMNS,
        BLOCK=block,
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit
def _grouped_kernel(
    x,
    weight,
    ends,
    out,
    x_stride,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: COLUMNS outputs of up to ROWS rows of one group."""
    tile = tl.program_id(1)
    group = tl.arange(0, GROUPS_PAD)
    exists = group < GROUPS
    end = tl.load(ends + group, mask=exists, other=0)
    begin = tl.load(ends + group - 1, mask=exists & (group > 0), other=0)
    tiles = tl.where(exists, (end - begin + ROWS - 1) // ROWS, 0)
    tiles_end = tl.cumsum(tiles, 0)
    mine = tl.sum((tiles_end <= tile).to(tl.int32), 0)  # groups whose tiles all lie before
    if mine < GROUPS:
        chosen = group == mine
        place = tile - tl.sum(tl.where(chosen, tiles_end - tiles, 0), 0)
        first = tl.sum(tl.where(chosen, begin, 0), 0) + place * ROWS
        row = first + tl.arange(0, ROWS)
        live = row < tl.sum(tl.where(chosen, end, 0), 0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        # Past the last column it is read again, so that no load has a mask of columns.
        line = mine.to(tl.int64) * OUTPUTS + tl.minimum(column, OUTPUTS - 1)
        lines = weight + line * INPUTS
        x_lines = x + row.to(tl.int64) * x_stride
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, INPUTS, BLOCK):
            inner = start + tl.arange(0, BLOCK)
            if INPUTS % BLOCK == 0:
                value = tl.load(x_lines[:, None] + inner, mask=live[:, None], other=0.0)
                factor = tl.load(lines[None, :] + inner[:, None])
            else:
                inside = inner < INPUTS
                mask = live[:, None] & inside
                value = tl.load(x_lines[:, None] + inner, mask=mask, other=0.0)
                mask = inside[:, None]
                factor = tl.load(lines[None, :] + inner[:, None], mask=mask, other=0.0)
            sums = tl.dot(value, factor, sums, input_precision="ieee")
        target = out + row[:, None].to(tl.int64) * OUTPUTS + column
        mask = live[:, None] & (column < OUTPUTS)
        tl.store(target, sums.to(out.dtype.element_ty), mask=mask)
