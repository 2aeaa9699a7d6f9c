"""A product whose rows have the same bits alone and in any batch, by one chain of tensor cores.

A number of the result is one sum over all columns in their order: each instruction of a warp group
adds 16 columns to what the one before left, whatever the other rows and the other weights of its
tile are, and whichever of the two is the left operand. The columns are never split. So tiles may
follow the number of rows, as speed asks; bits do not. Of few rows the weights stand on the left
(`few_rows`), so that no multiplication is wasted on missing rows; of more rows x does, 64 of its
rows an instruction. Behind the sum come, in float32 and in this order, the bias, then the residual
or the activation, and one rounding.

In float32 there are no tensor cores in it: fused multiply-adds, column by column, in one tile.
Meaning: `few_rows.few_rows` without splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_math_triton import dot
from headrace.kernels.device_sizes import multiprocessors
from headrace.kernels.few_rows_settings import FewRowsSettings
from headrace.kernels.few_rows_triton import few_rows
from headrace.kernels.fused_math_triton import (
    activate,
    begin,
    check_fused,
    launch_options,
    prefetch,
    wait,
)
from headrace.kernels.gated_activation import Activation
from headrace.kernels.invariant_product_settings import Settings, product_settings
from headrace.kernels.matrix_tiles_triton import load_tile, takes_tiles, tiles_of


def invariant_product(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    settings: Settings | None = None,
    pdl: bool = False,
) -> Tensor:
    """`few_rows.few_rows` without splits.

    Args:
        settings: `product_settings` chooses if absent.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("The batch-invariant product", x, pdl=pdl)
    tokens, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    assert weight.is_contiguous()
    assert weight.shape[1] == inputs
    assert weight.dtype == x.dtype
    assert residual is None or (activation is None and residual.shape == (tokens, outputs))
    assert dtype in (None, x.dtype, torch.float32)
    assert all(t.stride(-1) == 1 for t in (x, residual) if t is not None)
    out = x.new_empty(tokens, outputs, dtype=dtype or x.dtype)
    if tokens == 0:
        return out
    if settings is None:
        settings = product_settings(
            tokens,
            weight.shape[0],
            inputs,
            gated=activation is not None,
            dtype=x.dtype,
            device=x.device,
        )
    if isinstance(settings, FewRowsSettings):
        assert settings.splits == 1, "one chain"
        return few_rows(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            dtype=dtype,
            settings=settings,
            pdl=pdl,
        )
    rows = settings.weights if activation is None else settings.weights // 2
    described = settings.descriptor and all(map(takes_tiles, (x, weight)))
    programs = triton.cdiv(tokens, settings.tokens) * triton.cdiv(outputs, rows)
    if settings.persistent:
        programs = min(programs, multiprocessors(x.device))
    _product_kernel[(programs,)](
        x,
        weight,
        tiles_of(x, settings.tokens, settings.block) if described else None,
        tiles_of(weight, rows, settings.block) if described else None,
        bias,
        residual,
        out,
        tokens,
        outputs,
        inputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        INPUTS=inputs,
        TOKENS=settings.tokens,
        WEIGHTS=rows,
        BLOCK=settings.block,
        STAGES=settings.stages,
        GROUP=settings.group,
        ACTIVATION=activation,
        PREFETCH=min(settings.prefetch, inputs) if pdl else 0,
        PERSISTENT=settings.persistent,
        PDL=pdl,
        num_warps=settings.warps,
        num_stages=settings.stages,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["tokens", "columns"])
def _product_kernel(
    x,
    weight,
    x_blocks,
    weight_blocks,
    bias,
    residual,
    out,
    tokens,
    outputs,
    columns,
    x_stride,
    residual_stride,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: tiles of the result, one or every so many-th, over all columns."""
    token_tiles, weight_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, WEIGHTS)
    begin(PDL)
    if PREFETCH > 0:
        _, weight_tile = _place(tl.program_id(0), token_tiles, weight_tiles, GROUP)
        row = weight_tile * WEIGHTS + tl.arange(0, WEIGHTS)
        lines = weight + tl.minimum(row, outputs - 1).to(tl.int64) * INPUTS
        PREFETCH_PAD: tl.constexpr = triton.next_power_of_2(PREFETCH)
        prefetch(lines, PREFETCH, PREFETCH_PAD)
        if ACTIVATION is not None:
            prefetch(lines + outputs.to(tl.int64) * INPUTS, PREFETCH, PREFETCH_PAD)
    wait(PDL)
    if PERSISTENT:
        # Flat: the first columns of a tile come while the numbers of the one before are written.
        tiles = token_tiles * weight_tiles
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            token_tile, weight_tile = _place(tile, token_tiles, weight_tiles, GROUP)
            _multiply(
                x, weight, x_blocks, weight_blocks, bias, residual, out, tokens, outputs, columns,
                x_stride, residual_stride, token_tile, weight_tile, INPUTS, TOKENS, WEIGHTS, BLOCK,
                STAGES, ACTIVATION,
            )  # fmt: skip
    else:
        token_tile, weight_tile = _place(tl.program_id(0), token_tiles, weight_tiles, GROUP)
        _multiply(
            x, weight, x_blocks, weight_blocks, bias, residual, out, tokens, outputs, columns,
            x_stride, residual_stride, token_tile, weight_tile, INPUTS, TOKENS, WEIGHTS, BLOCK,
            STAGES, ACTIVATION,
        )  # fmt: skip


@triton.jit
def _multiply(
    x,
    weight,
    x_blocks,
    weight_blocks,
    bias,
    residual,
    out,
    tokens,
    outputs,
    columns,
    x_stride,
    residual_stride,
    token_tile,
    weight_tile,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """TOKENS rows of x by WEIGHTS rows of weights (with an activation, of gate and of up)."""
    first_token, first_row = token_tile * TOKENS, weight_tile * WEIGHTS
    token = first_token + tl.arange(0, TOKENS)
    row = first_row + tl.arange(0, WEIGHTS)
    exists, live = token < tokens, row < outputs
    # Past the last row it is read again, so that no load has a mask of rows.
    lines = weight + tl.minimum(row, outputs - 1).to(tl.int64) * INPUTS  # [WEIGHTS]
    up_lines = lines + outputs.to(tl.int64) * INPUTS
    x_lines = x + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride  # [TOKENS]
    sums = tl.zeros([TOKENS, WEIGHTS], tl.float32)
    up_sums = sums
    # `columns` is INPUTS, which the compiler must not know here: of a loop of one turn it makes a
    # product that starts from the residual, and so another order of sums.
    for column in tl.range(0, columns, BLOCK, num_stages=STAGES):
        value = load_tile(x_blocks, x_lines, first_token, column, INPUTS, BLOCK)  # [TOKENS, BLOCK]
        matrix = load_tile(weight_blocks, lines, first_row, column, INPUTS, BLOCK)
        sums = dot(value, matrix.T, sums)
        if ACTIVATION is not None:
            matrix = load_tile(weight_blocks, up_lines, outputs + first_row, column, INPUTS, BLOCK)
            up_sums = dot(value, matrix.T, up_sums)
    if bias is not None:
        sums += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if bias is not None:
            up_bias = tl.load(bias + outputs + row, mask=live, other=0.0)
            up_sums += up_bias.to(tl.float32)[None, :]
        sums = activate(sums, ACTIVATION) * up_sums
    mask = exists[:, None] & live[None, :]
    if residual is not None:
        place = token[:, None].to(tl.int64) * residual_stride + row[None, :]
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    place = token[:, None].to(tl.int64) * outputs + row[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place(program, token_tiles, weight_tiles, GROUP: tl.constexpr):
    """Tile of tokens and of weights: GROUP tiles of tokens go through the weights together."""
    group = program // (GROUP * weight_tiles)
    width = tl.minimum(token_tiles - group * GROUP, GROUP)
    within = program % (GROUP * weight_tiles)
    return group * GROUP + within % width, within // width
