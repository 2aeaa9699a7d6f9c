"""act(gate) * up in Triton. Meaning: `gated_activation`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.fused_math_triton import activate, begin, check_fused, launch_options, wait
from headrace.kernels.gated_activation import Activation

BLOCK = 1024


def gated_activation(
    x: Tensor,
    *,
    activation: Activation = "silu",
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """`gated_activation.gated_activation`; `pdl`: programmatic dependent launch.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("Gated activation", x, pdl=pdl)
    parts = x if x.dim() == 3 else x[None]
    tokens, size = parts.shape[1], parts.shape[2] // 2
    out = x.new_empty(tokens, size, dtype=dtype or x.dtype) if out is None else out
    assert out.shape == (tokens, size)
    assert x.dim() == 2 or x.is_contiguous()
    assert x.stride(-1) == out.stride(1) == 1
    if tokens > 0:
        _gate_kernel[(tokens, triton.cdiv(size, BLOCK))](
            x,
            out,
            parts.stride(1),
            out.stride(0),
            PARTS=parts.shape[0],
            SIZE=size,
            BLOCK=BLOCK,
            ACTIVATION=activation,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


@triton.jit
def _gate_kernel(
    x,
    out,
    x_stride,
    out_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a block of one token's columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    begin(PDL)
    wait(PDL)
    row = x + token * x_stride
    gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        row += tl.num_programs(0).to(tl.int64) * x_stride
        gate += tl.load(row + column, mask=mask, other=0.0)
        up += tl.load(row + SIZE + column, mask=mask, other=0.0)
    result = activate(gate, ACTIVATION) * up
    tl.store(out + token * out_stride + column, result.to(out.dtype.element_ty), mask=mask)
