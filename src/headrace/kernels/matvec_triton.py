"""The product of one row in Triton, with the norm in front and what follows behind.

Reading the weights once is the whole cost, so the shape of the programs serves the reading. Since
a norm is a factor of the whole row, rstd (W (x g)) = W (rstd x g): its sum of squares is gathered
in the pass that multiplies. Meaning: `matvec`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from headrace.kernels.matrix_tiles_triton import load_tile
from headrace.kernels.matvec_settings import MatvecSettings, matvec_settings


def matvec(
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
    settings: MatvecSettings | None = None,
) -> Tensor:
    """`matvec.matvec`, with the kernel's own two arguments.

    Args:
        pdl: programmatic dependent launch is allowed: the weights are asked for before the kernel
            in front has ended. Shapes that are slower so are launched without it, which the
            kernels around them bear: this one then starts after all in front, and the next one
            after it.
        settings: shape of the programs; `matvec_settings` gives it if absent.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("The product of one row", x, pdl=pdl)
    inputs = x.shape[1]
    settings = settings or matvec_settings(weight.shape[0], inputs)
    outputs = weight.shape[0] // (1 if activation is None else 2)
    out = x.new_empty(1, outputs) if out is None else out
    assert x.shape[0] == 1
    assert residual is None or activation is None
    assert weight.is_contiguous()
    assert weight.shape[1] == inputs
    assert weight.dtype == x.dtype
    assert out.dtype in (x.dtype, torch.float32)
    assert out.shape == (1, outputs)
    assert all(t.stride(-1) == 1 for t in (x, out, residual) if t is not None)
    pdl = pdl and settings.dependent_launch
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
    return out


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
    first = load_tile(None, lines, 0, 0, INPUTS, BLOCK)
    first_gate = first
    if ACTIVATION is not None:
        first_gate = load_tile(None, gates, 0, 0, INPUTS, BLOCK)
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
        tile = first if start == 0 else load_tile(None, lines, 0, start, INPUTS, BLOCK)
        sums += tile.to(tl.float32) * value
        if ACTIVATION is not None:
            tile = first_gate if start == 0 else load_tile(None, gates, 0, start, INPUTS, BLOCK)
            gate_sums += tile.to(tl.float32) * value
    rstd = 1.0
    if norm_weight is not None:
        rstd = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)  # [1]
    live = row < outputs
    result = tl.sum(sums, 1) * rstd
    if ACTIVATION is None:
        result = _finish(result, row, live, bias, residual)
    else:
        gate = _finish(tl.sum(gate_sums, 1) * rstd, row, live, bias, None)
        up = _finish(result, outputs + row, live, bias, None)
        result = activate(gate, ACTIVATION) * up
    tl.store(out + row, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _finish(sums, row, live, bias, residual):
    """sums + bias[row] + residual[row], float32."""
    if bias is not None:
        sums += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + row, mask=live, other=0.0).to(tl.float32)
    return sums
