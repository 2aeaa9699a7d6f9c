"""Products for 1 to 16 rows in Triton, with the norm in front and what follows behind.

Reading the weights once is the whole cost, so the shapes serve the reading: one row of x is
multiplied by FMA, more rows by `tl.dot` padded to 16. Since a norm is a factor of the whole row,
rstd (W (x g)) = W (rstd x g): its sum of squares is gathered in the pass that multiplies.
Meaning: `small_linear`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_math_triton import dot
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
from headrace.kernels.small_linear import MAX_ROWS
from headrace.kernels.small_linear_settings import (
    MatvecSettings,
    ThinSettings,
    matvec_settings,
    thin_settings,
)


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
    settings: MatvecSettings | ThinSettings | None = None,
) -> Tensor:
    """`small_linear.small_linear`, with the kernels' own two arguments.

    A shape of weights has two variants for each set of options: one row, and 2 to 16 rows. Their
    sums are ordered differently: a row alone has other last bits than in a batch.

    Args:
        pdl: programmatic dependent launch; the weights are asked for before the wait.
        settings: shape of the programs: `MatvecSettings` for one row of x, else `ThinSettings`;
            `small_linear_settings` gives them if absent.

    Raises:
        UnsupportedError: device or dtype that the kernels do not take.
    """
    check_fused("Small linear", x, pdl=pdl)
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    out = x.new_empty(rows, outputs) if out is None else out
    assert 1 <= rows <= MAX_ROWS
    assert residual is None or activation is None
    assert weight.is_contiguous()
    assert weight.shape[1] == inputs
    assert weight.dtype == x.dtype == out.dtype
    assert out.shape == (rows, outputs)
    assert all(t.stride(-1) == 1 for t in (x, out, residual) if t is not None)
    launch = _matvec if rows == 1 else _thin
    launch(x, weight, norm_weight, eps, bias, residual, activation, out, pdl, settings)
    return out


def _matvec(x, weight, norm_weight, eps, bias, residual, activation, out, pdl, settings):
    outputs, inputs = out.shape[1], x.shape[1]
    settings = settings or matvec_settings(weight.shape[0], inputs)
    rows = settings.rows if activation is None else max(1, settings.rows // 2)
    _matvec_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        eps,
        outputs,
        INPUTS=inputs,
        INPUTS_PAD=next_power(inputs),
        ROWS=rows,
        BLOCK=settings.block,
        ACTIVATION=activation,
        PREFETCH=settings.prefetch and pdl,
        PDL=pdl,
        num_warps=settings.warps,
        **launch_options(pdl),
    )


def _thin(x, weight, norm_weight, eps, bias, residual, activation, out, pdl, settings):
    outputs, inputs = out.shape[1], x.shape[1]
    settings = settings or thin_settings(weight.shape[0], inputs, weight.element_size())
    _thin_kernel[(triton.cdiv(outputs, settings.block),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        eps,
        x.shape[0],
        outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        INPUTS=inputs,
        INPUTS_PAD=next_power(inputs),
        BLOCK=settings.block,
        DEPTH=settings.depth,
        STAGES=settings.stages,
        # x times the norm's weight, not yet scaled to unit size, can leave float16's range.
        WIDE=x.dtype is torch.float16 and norm_weight is not None,
        ACTIVATION=activation,
        PREFETCH=settings.prefetch and pdl,
        PDL=pdl,
        num_warps=settings.warps,
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["outputs"])
def _matvec_kernel(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    eps,
    outputs,
    INPUTS: tl.constexpr,
    INPUTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS outputs. The products stay apart in registers until the last block."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Past the last row it is read again, so that no load of weights has a mask of rows.
    lines = weight + tl.minimum(row, outputs - 1).to(tl.int64) * INPUTS  # [ROWS]
    gates = lines
    if ACTIVATION is not None:
        lines += outputs.to(tl.int64) * INPUTS
    begin(PDL)
    first = _tile(lines, 0, INPUTS, BLOCK)
    first_gate = first
    if ACTIVATION is not None:
        first_gate = _tile(gates, 0, INPUTS, BLOCK)
    if PREFETCH:
        prefetch(lines, INPUTS, INPUTS_PAD)
        if ACTIVATION is not None:
            prefetch(gates, INPUTS, INPUTS_PAD)
    wait(PDL)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    gate_sums = sums
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.static_range(0, INPUTS, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + column, mask=column < INPUTS, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += value * value
            scale = tl.load(norm_weight + column, mask=column < INPUTS, other=0.0)
            value *= scale.to(tl.float32)
        tile = first if start == 0 else _tile(lines, start, INPUTS, BLOCK)
        sums += tile.to(tl.float32) * value
        if ACTIVATION is not None:
            tile = first_gate if start == 0 else _tile(gates, start, INPUTS, BLOCK)
            gate_sums += tile.to(tl.float32) * value
    rstd = 1.0
    if norm_weight is not None:
        rstd = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)  # [1]
    live = row < outputs
    result = tl.sum(sums, 1) * rstd
    if ACTIVATION is None:
        result = _finish(result, row, live, bias, residual, row)
    else:
        gate = _finish(tl.sum(gate_sums, 1) * rstd, row, live, bias, None, row)
        up = _finish(result, outputs + row, live, bias, None, row)
        result = activate(gate, ACTIVATION) * up
    tl.store(out + row, result.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "outputs"])
def _thin_kernel(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    eps,
    rows,
    outputs,
    x_stride,
    residual_stride,
    out_stride,
    INPUTS: tl.constexpr,
    INPUTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK outputs of all rows of x."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lines = weight + tl.minimum(column, outputs - 1).to(tl.int64) * INPUTS  # [BLOCK]
    gates = lines
    if ACTIVATION is not None:
        lines += outputs.to(tl.int64) * INPUTS
    member = tl.arange(0, 16)[:, None]
    begin(PDL)
    if PREFETCH:
        prefetch(lines, INPUTS, INPUTS_PAD)
        if ACTIVATION is not None:
            prefetch(gates, INPUTS, INPUTS_PAD)
    wait(PDL)
    sums = tl.zeros([16, BLOCK], tl.float32)
    gate_sums = sums
    squares = tl.zeros([16, DEPTH], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        depth = start + tl.arange(0, DEPTH)[None, :]
        mask = member < rows
        if INPUTS % DEPTH != 0:
            mask = mask & (depth < INPUTS)
        value = tl.load(x + member * x_stride + depth, mask=mask, other=0.0)
        if norm_weight is not None:
            wide = value.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_weight + depth, mask=depth < INPUTS, other=0.0)
            wide *= scale.to(tl.float32)
            value = wide if WIDE else wide.to(value.dtype)
        sums = _multiply(value, _tile(lines, start, INPUTS, DEPTH), sums, WIDE)
        if ACTIVATION is not None:
            gate_sums = _multiply(value, _tile(gates, start, INPUTS, DEPTH), gate_sums, WIDE)
    if norm_weight is not None:
        rstd = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[:, None]  # [16, 1]
        sums *= rstd
        gate_sums *= rstd
    column = column[None, :]
    live = (member < rows) & (column < outputs)
    place = member.to(tl.int64) * residual_stride + column
    if ACTIVATION is None:
        result = _finish(sums, column, live, bias, residual, place)
    else:
        gate = _finish(gate_sums, column, live, bias, None, place)
        up = _finish(sums, outputs + column, live, bias, None, place)
        result = activate(gate, ACTIVATION) * up
    offsets = member.to(tl.int64) * out_stride + column
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _tile(lines, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] of the rows at `lines`, columns from `start`; 0 past the end."""
    column = start + tl.arange(0, BLOCK)[None, :]
    if SIZE % BLOCK == 0:
        tile = tl.load(lines[:, None] + column)
    else:
        tile = tl.load(lines[:, None] + column, mask=column < SIZE, other=0.0)
    return tile


@triton.jit
def _multiply(value, tile, sums, WIDE: tl.constexpr):
    """sums [16, N] + value [16, D] tile [N, D]^T; WIDE: float32 by float16, in TF32 of three parts.

    float16 fits TF32 as it is.
    """
    if WIDE:
        tile = tl.trans(tile.to(tl.float32))
        sums = tl.dot(value, tile, sums, input_precision="tf32x3")
    else:
        sums = dot(value, tl.trans(tile), sums)
    return sums


@triton.jit
def _finish(sums, column, live, bias, residual, place):
    """sums + bias[column] + residual[place], float32."""
    if bias is not None:
        sums += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    return sums
