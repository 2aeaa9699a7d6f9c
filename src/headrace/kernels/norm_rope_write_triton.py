"""q/k norm, rotation and KV write in one Triton launch. Meaning: `norm_rope_write`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.fused_math_triton import (
    begin,
    check_fused,
    launch_options,
    next_power,
    wait,
)

HEADS = 4  # of a program
MANY_TOKENS = 512  # from here on a program takes several tokens
TILE_VALUES = 2048  # of one head in a program: registers for a few loads in flight per thread


def norm_rope_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    tile: int | None = None,
) -> Tensor:
    """`norm_rope_write.norm_rope_write`; `pdl`: programmatic dependent launch.

    Args:
        tile: tokens of a program, which decide the order of a norm's sum: `tile_tokens` chooses if
            absent. A constant makes a token's result the same bits in every step.

    Raises:
        UnsupportedError: device or dtype that the kernel does not take.
    """
    check_fused("Norm, rope and KV write", qkv, pdl=pdl)
    parts = qkv if qkv.dim() == 3 else qkv[None]
    tokens, width = parts.shape[1:]
    page, kv_heads, dim = k_cache.shape[1:]
    value_dim, rotary = v_cache.shape[3], cos_sin.shape[1]
    heads = (width - kv_heads * value_dim) // dim - kv_heads
    out = qkv.new_empty(tokens, heads, dim, dtype=dtype or qkv.dtype) if out is None else out
    assert (q_norm is None) == (k_norm is None)
    assert width == (heads + kv_heads) * dim + kv_heads * value_dim
    assert v_cache.shape[:3] == k_cache.shape[:3]
    assert qkv.dim() == 2 or qkv.is_contiguous()
    assert rotary <= dim
    assert rotary % 2 == 0
    assert cos_sin.dtype is torch.float32
    assert positions.dtype is slots.dtype is torch.int64
    assert out.shape == (tokens, heads, dim)
    assert all(t.is_contiguous() for t in (cos_sin, positions, slots, out))
    assert qkv.stride(-1) == k_cache.stride(3) == v_cache.stride(3) == 1
    if tokens > 0:
        programs = triton.cdiv(heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
        tile = tile or tile_tokens(tokens, max(dim, value_dim))
        _rope_kernel[(programs, triton.cdiv(tokens, tile))](
            qkv,
            cos_sin,
            positions,
            k_cache,
            v_cache,
            slots,
            q_norm,
            k_norm,
            out,
            eps,
            tokens,
            parts.stride(1),
            PARTS=parts.shape[0],
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            VALUE_PAD=next_power(value_dim),
            ROTARY=rotary,
            HALF_PAD=next_power(rotary // 2),
            REST_PAD=next_power(max(1, dim - rotary)),
            PAGE=page,
            K_STRIDES=k_cache.stride()[:3],
            V_STRIDES=v_cache.stride()[:3],
            BLOCK=HEADS,
            TOKENS=tile,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


def tile_tokens(tokens: int, dim: int) -> int:
    """Tokens of a program: one where a step has few, so that they spread over the device."""
    return 1 if tokens < MANY_TOKENS else min(16, TILE_VALUES // next_power(dim))


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def _rope_kernel(
    qkv,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    slots,
    q_norm,
    k_norm,
    out,
    eps,
    tokens,
    qkv_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: TOKENS tokens, BLOCK heads of q, of k or of v, as [BLOCK, TOKENS, columns].

    Heads are the slowest dimension: a thread holds the angles of its token for all of them.
    """
    Q_PROGRAMS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    K_PROGRAMS: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    member = tl.arange(0, BLOCK)[:, None, None]
    begin(PDL)
    wait(PDL)
    position = tl.load(positions + token, mask=exists, other=0)
    slot = tl.load(slots + token, mask=exists, other=0)
    exists, token = exists[None, :, None], token[None, :, None]
    row = qkv + token * qkv_stride
    part_stride = tokens.to(tl.int64) * qkv_stride
    angles = cos_sin + position[None, :, None] * ROTARY
    page, place = (slot // PAGE)[None, :, None], (slot % PAGE)[None, :, None]
    if program < Q_PROGRAMS:
        head = program * BLOCK + member
        live = exists & (head < HEADS)
        start, target = row + head * DIM, out + (token * HEADS + head) * DIM
        _turn(
            start,
            part_stride,
            target,
            live,
            q_norm,
            eps,
            angles,
            PARTS,
            DIM,
            ROTARY,
            HALF_PAD,
            REST_PAD,
        )
    elif program < Q_PROGRAMS + K_PROGRAMS:
        head = (program - Q_PROGRAMS) * BLOCK + member
        live = exists & (head < KV_HEADS)
        start = row + (HEADS + head) * DIM
        target = k_cache + page * K_STRIDES[0] + place * K_STRIDES[1] + head * K_STRIDES[2]
        _turn(
            start,
            part_stride,
            target,
            live,
            k_norm,
            eps,
            angles,
            PARTS,
            DIM,
            ROTARY,
            HALF_PAD,
            REST_PAD,
        )
    else:
        head = (program - Q_PROGRAMS - K_PROGRAMS) * BLOCK + member
        column = tl.arange(0, VALUE_PAD)[None, None, :]
        mask = exists & (head < KV_HEADS) & (column < VALUE_DIM)
        start = row + (HEADS + KV_HEADS) * DIM + head * VALUE_DIM
        target = v_cache + page * V_STRIDES[0] + place * V_STRIDES[1] + head * V_STRIDES[2]
        v = _total(start + column, part_stride, mask, PARTS)
        tl.store(target + column, v.to(v_cache.dtype.element_ty), mask=mask)


@triton.jit
def _turn(
    start,
    part_stride,
    target,
    live,
    weight,
    eps,
    angles,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """Norms and turns the heads at `start` [BLOCK, TOKENS, 1] and stores them at `target`.

    Where not `live` nothing is read or written. `angles` [1, TOKENS, 1].

    A head is three pieces: the two halves that turn into each other, and the rest.
    """
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, HALF_PAD)[None, None, :]
    inside = column < HALF
    mask = live & inside
    first = _total(start + column, part_stride, mask, PARTS)
    second = _total(start + HALF + column, part_stride, mask, PARTS)
    squares = tl.sum(first * first + second * second, 2)  # [BLOCK, TOKENS]
    if DIM > ROTARY:
        rest_column = ROTARY + tl.arange(0, REST_PAD)[None, None, :]
        rest_inside = rest_column < DIM
        rest = _total(start + rest_column, part_stride, live & rest_inside, PARTS)
        squares += tl.sum(rest * rest, 2)
    if weight is not None:
        rstd = tl.rsqrt(squares / DIM + eps)[:, :, None]
        first *= rstd * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        second *= rstd * tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)
        if DIM > ROTARY:
            scale = tl.load(weight + rest_column, mask=rest_inside, other=0.0)
            rest *= rstd * scale.to(tl.float32)
    cos = tl.load(angles + column, mask=inside, other=0.0)
    sin = tl.load(angles + HALF + column, mask=inside, other=0.0)
    kind = target.dtype.element_ty
    tl.store(target + column, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(target + HALF + column, (second * cos + first * sin).to(kind), mask=mask)
    if DIM > ROTARY:
        tl.store(target + rest_column, rest.to(kind), mask=live & rest_inside)


@triton.jit
def _total(place, part_stride, mask, PARTS: tl.constexpr):
    """float32 sum of the parts at `place`; 0 where masked."""
    total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(place + part * part_stride, mask=mask, other=0.0)
    return total
