"""RMSNorm in Triton, alone and behind the addition of a sum's parts. Meaning: `norms`.

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
    _launch(_in_groups(x), None, weight, out, None, eps, pdl)
    return out


def sum_rms_norm(
    parts: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`norms.sum_rms_norm`; `pdl`: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype or size that the kernel does not take.
    """
    assert parts.dim() == 3
    assert parts.is_contiguous()
    out, total = (parts.new_empty(parts.shape[1:], dtype=dtype) for _ in range(2))
    _launch(_in_groups(parts[0]), parts, weight, out, total, eps, pdl)
    return out, total


def _launch(
    x: Tensor,
    parts: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    pdl: bool,
) -> None:
    """x: [T, groups, size], and of `parts` the first."""
    check_fused("RMSNorm", out, pdl=pdl)
    tokens, groups, size = x.shape
    if size > MAX_SIZE:
        raise UnsupportedError(
            f"RMSNorm by Triton got rows of {size}", why=f"a program holds at most {MAX_SIZE}"
        )
    out = _in_groups(out)
    assert weight.shape == (size,)
    assert out.shape == x.shape
    if tokens == 0:
        return
    size_pad = next_power(size)
    group_block = min(next_power(groups), max(1, TILE // size_pad))
    _norm_kernel[(tokens, triton.cdiv(groups, group_block))](
        x,
        out,
        total,
        weight,
        eps,
        groups,
        *x.stride()[:2],
        *out.stride()[:2],
        PARTS=1 if parts is None else parts.shape[0],
        SIZE=size,
        SIZE_PAD=size_pad,
        GROUP_BLOCK=group_block,
        PDL=pdl,
        num_warps=min(16, max(1, group_block * size_pad // (512 if parts is None else 256))),
        **launch_options(pdl),
    )


def _in_groups(x: Tensor) -> Tensor:
    """[T, groups, size], and the last dimension lies without gaps."""
    assert x.stride(-1) == 1
    return x[:, None] if x.dim() == 2 else x


@triton.jit(do_not_specialize=["groups"])
def _norm_kernel(
    x,
    out,
    total,
    weight,
    eps,
    groups,
    x_token,
    x_group,
    out_token,
    out_group,
    PARTS: tl.constexpr,
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
    place = x + token * x_token + group * x_group + column
    wide = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        place += tl.num_programs(0).to(tl.int64) * x_token
        wide += tl.load(place, mask=mask, other=0.0)
    place = token * out_token + group * out_group + column
    if total is not None:
        value = wide.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=mask)
        wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / SIZE  # [GROUP_BLOCK]
    normed = wide * tl.rsqrt(mean + eps)[:, None] * scale
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)
