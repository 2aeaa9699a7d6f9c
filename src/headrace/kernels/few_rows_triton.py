"""The product of few rows in Triton: the weights are read once, at the speed of memory.

The weights are the wide operand: a program multiplies some of their rows with all rows of x, so
that few rows of x waste no tensor core's tile and many bytes of weights are in flight. Where the
outputs are too few to keep a device busy, the columns are split too (split-K), and the kernel that
reads the result adds the parts, in their order, where a kernel of its own would cost a launch.
Meaning: `few_rows`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.few_rows_settings import MAX_ROWS, FewRowsSettings
from headrace.kernels.fused_math_triton import (
    activate,
    begin,
    check_fused,
    launch_options,
    next_power,
    prefetch,
    wait,
)
from headrace.kernels.gated_activation import Activation
from headrace.kernels.matrix_tiles_triton import load_tile, takes_tiles, tiles_of


def few_rows(
    x: Tensor,
    weight: Tensor,
    *,
    settings: FewRowsSettings,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """`few_rows.few_rows` with `settings.splits` parts; `pdl`: programmatic dependent launch, which
    settings may leave out.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("The product of few rows", x, pdl=pdl)
    if x.dtype is torch.float32:
        raise UnsupportedError(
            "The product of few rows by Triton got float32",
            why="tensor cores would round its operands; it takes bfloat16 and float16",
        )
    tokens, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    splits = settings.splits
    assert weight.is_contiguous()
    assert weight.shape[1] == inputs
    assert weight.dtype == x.dtype
    assert splits == 1 or activation is None
    assert residual is None or (activation is None and residual.shape == (tokens, outputs))
    assert dtype in (None, x.dtype, torch.float32)
    assert all(t.stride(-1) == 1 for t in (x, residual) if t is not None)
    kind = torch.float32 if splits > 1 else dtype or x.dtype
    out = x.new_empty((*([splits] if splits > 1 else []), tokens, outputs), dtype=kind)
    if tokens == 0:
        return out
    rows = settings.weights if activation is None else settings.weights // 2
    block_tokens = min(MAX_ROWS, max(16, next_power(tokens)))
    pdl = pdl and settings.dependent_launch
    whole = inputs // settings.block // splits * settings.block  # every split has these columns
    descriptor = settings.descriptor and takes_tiles(x) and takes_tiles(weight)
    _few_rows_kernel[(triton.cdiv(outputs, rows), splits, triton.cdiv(tokens, block_tokens))](
        x,
        weight,
        tiles_of(x, block_tokens, settings.block) if descriptor else None,
        tiles_of(weight, rows, settings.block) if descriptor else None,
        bias,
        residual,
        out,
        tokens,
        outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        INPUTS=inputs,
        ROWS=rows,
        TOKENS=block_tokens,
        BLOCK=settings.block,
        SPLITS=splits,
        STAGES=settings.stages,
        ACTIVATION=activation,
        PREFETCH=min(settings.prefetch, whole) if pdl else 0,
        PDL=pdl,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _few_rows_kernel(
    x,
    weight,
    x_tiles,
    weight_tiles,
    bias,
    residual,
    out,
    tokens,
    outputs,
    x_stride,
    residual_stride,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS rows of weights (with an activation, of gate and of up), one split of the
    columns, TOKENS rows of x. Sums lie as [ROWS, TOKENS]: the weights are the left operand."""
    BLOCKS: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    row_start, split = tl.program_id(0) * ROWS, tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    first_block, end_block = split * BLOCKS // SPLITS, (split + 1) * BLOCKS // SPLITS
    row = row_start + tl.arange(0, ROWS)
    token = first_token + tl.arange(0, TOKENS)
    # Past the last row it is read again, so that no load has a mask of rows.
    lines = weight + tl.minimum(row, outputs - 1).to(tl.int64) * INPUTS  # [ROWS]
    up_lines = lines + outputs.to(tl.int64) * INPUTS
    x_lines = x + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride  # [TOKENS]
    begin(PDL)
    if PREFETCH > 0:
        PREFETCH_PAD: tl.constexpr = triton.next_power_of_2(PREFETCH)
        prefetch(lines + first_block * BLOCK, PREFETCH, PREFETCH_PAD)
        if ACTIVATION is not None:
            prefetch(up_lines + first_block * BLOCK, PREFETCH, PREFETCH_PAD)
    wait(PDL)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    up_sums = sums
    for block in tl.range(first_block, end_block, num_stages=STAGES):
        column = block * BLOCK
        value = load_tile(x_tiles, x_lines, first_token, column, INPUTS, BLOCK).T  # [BLOCK, TOKENS]
        sums = tl.dot(load_tile(weight_tiles, lines, row_start, column, INPUTS, BLOCK), value, sums)
        if ACTIVATION is not None:
            tile = load_tile(weight_tiles, up_lines, outputs + row_start, column, INPUTS, BLOCK)
            up_sums = tl.dot(tile, value, up_sums)
    result = tl.trans(sums)  # [TOKENS, ROWS]
    live = row < outputs
    first = row < tl.where(split == 0, outputs, 0)  # live, and the part that addends belong to
    exists = token < tokens
    if bias is not None:
        result += tl.load(bias + row, mask=first, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        up = tl.trans(up_sums)
        if bias is not None:
            up += tl.load(bias + outputs + row, mask=live, other=0.0).to(tl.float32)[None, :]
        result = activate(result, ACTIVATION) * up
    mask = exists[:, None] & live[None, :]
    if residual is not None:
        place = token[:, None].to(tl.int64) * residual_stride + row[None, :]
        mine = exists[:, None] & first[None, :]
        result += tl.load(residual + place, mask=mine, other=0.0).to(tl.float32)
    place = (split * tokens + token)[:, None].to(tl.int64) * outputs + row[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
