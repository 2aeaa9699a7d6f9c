"""RMSNorm in Triton, alone and behind the addition of a residual. Meaning: `norms`.

A program holds whole rows in registers: each number is read once and written once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.fused_math_triton import (
    begin,
    check_fused,
    launch_options,
    next_power,
    wait,
)

MAX_SIZE = 32768
TILE = 2048  # elements of a program that norms several short rows


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """`norms.rms_norm`; `pdl`: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype or size that the kernel does not take.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _launch(x, None, weight, out, None, eps, pdl)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
    total: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norms.add_rms_norm`; `pdl`: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype or size that the kernel does not take.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    total = torch.empty_like(out) if total is None else total
    assert x.dim() == 2
    assert x.shape == residual.shape == total.shape
    assert residual.dtype == total.dtype == x.dtype
    _launch(x, residual, weight, out, total, eps, pdl)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    pdl: bool,
) -> None:
    check_fused("RMSNorm", x, pdl=pdl)
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise UnsupportedError(
            f"RMSNorm by Triton got rows of {size}", why=f"a program holds at most {MAX_SIZE}"
        )
    views = [None if t is None else _in_groups(t) for t in (x, residual, out, total)]
    tokens, groups = _in_groups(x).shape[:2]
    assert weight.shape == (size,)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    if tokens == 0:
        return
    size_pad = next_power(size)
    group_block = min(next_power(groups), max(1, TILE // size_pad))
    _norm_kernel[(tokens, triton.cdiv(groups, group_block))](
        *views,
        weight,
        eps,
        groups,
        *(stride for t in views for stride in ((0, 0) if t is None else t.stride()[:2])),
        SIZE=size,
        SIZE_PAD=size_pad,
        GROUP_BLOCK=group_block,
        PDL=pdl,
        num_warps=min(16, max(1, group_block * size_pad // 512)),
        **launch_options(pdl),
    )


def _in_groups(x: Tensor) -> Tensor:
    """[T, groups, size], and the last dimension lies without gaps."""
    assert x.stride(-1) == 1
    return x[:, None] if x.dim() == 2 else x


@triton.jit(do_not_specialize=["groups"])
def _norm_kernel(
    x,
    residual,
    out,
    total,
    weight,
    eps,
    groups,
    x_token,
    x_group,
    residual_token,
    residual_group,
    out_token,
    out_group,
    total_token,
    total_group,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some groups of one token."""
    token = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUP_BLOCK + tl.arange(0, GROUP_BLOCK))[:, None]
    column = tl.arange(0, SIZE_PAD)[None, :]
    mask = (group < groups) & (column < SIZE)
    begin(PDL)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + token * x_token + group * x_group + column, mask=mask, other=0.0)
    if residual is not None:
        place = token * residual_token + group * residual_group + column
        other = tl.load(residual + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + token * total_token + group * total_group + column, value, mask=mask)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / SIZE  # [GROUP_BLOCK]
    normed = wide * tl.rsqrt(mean + eps)[:, None] * scale
    place = token * out_token + group * out_group + column
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)
