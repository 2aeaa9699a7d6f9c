"""Paged extend attention in Triton: new tokens over a cached prefix and over each other.

A tile holds the query heads of one KV head for a few consecutive queries, head by head within a
query: each key block is read once for the group. Blocks outside the causal range and the window of
the tile are not visited. Meaning and shapes: `attention_twins.paged_extend`.

Runtime integers are not specialised: a model has one variant, however batches look.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_math_triton import (
    LN_2,
    add_sink,
    base2_logits,
    base2_lse,
    block_keys,
    check_arguments,
    divide,
    load_rows,
    locate,
    padded,
    softmax_step,
)
from headrace.kernels.fused_math_triton import begin, launch_options, wait

HOPPER_SHARED = 227 * 1024  # bytes of shared memory of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendTile:
    """What a program takes at once.

    Attributes:
        rows: heads of the group times queries. block_bytes: of K and V per pipeline stage.
    """

    rows: int
    block_bytes: int
    warps: int


def extend_tile(*, row_bytes: int, element: int, shared_memory: int) -> ExtendTile:
    """The tile of a model on a device, whatever the batch: it decides the order of additions.

    Measured on an H200 in bfloat16, TFLOP/s at 8 x 1024 and 1 x 8192 tokens: with head size 128,
    343 and 515 by the large tile, 280 and 361 by the one for less shared memory; with 64, 235 and
    317 by blocks of 16 KiB, 207 and 300 by 32.

    Args:
        row_bytes: of a key and its value, padded; element: bytes of one number of them.
        shared_memory: bytes that a block may have.
    """
    if element == 4:
        return ExtendTile(rows=32, block_bytes=32 * 1024, warps=4)
    if row_bytes <= 256:
        return ExtendTile(rows=64, block_bytes=16 * 1024, warps=4)
    if row_bytes <= 512 and shared_memory >= HOPPER_SHARED:
        return ExtendTile(rows=128, block_bytes=64 * 1024, warps=8)
    return ExtendTile(rows=64, block_bytes=32 * 1024, warps=4)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on `device`; the interpreter has none."""
    if device.type == "cpu":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def paged_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    extend_start: Tensor,
    extend_lens: Tensor,
    prefix_lens: Tensor,
    *,
    max_extend: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: ExtendTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """`attention_twins.paged_extend`; padding rows of `out` are likewise left as they were.

    Args:
        tile: `extend_tile` chooses if absent.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    tokens, heads, dim = q.shape
    page, kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    if out is None:
        out = q.new_zeros(tokens, heads, value_dim)
    check_arguments(q, k_cache, v_cache, [out, *([] if lse is None else [lse])], pdl=pdl)
    batch = extend_lens.shape[0]
    if batch == 0 or max_extend == 0 or tokens == 0:
        return out
    group = heads // kv_heads
    element = q.element_size()
    row_bytes = (padded(dim) + padded(value_dim)) * element
    if tile is None:
        memory = shared_memory(q.device)
        tile = extend_tile(row_bytes=row_bytes, element=element, shared_memory=memory)
    rows = max(padded(group), tile.rows)
    _extend_kernel[(triton.cdiv(max_extend, rows // group), kv_heads, batch)](
        q,
        k_cache,
        v_cache,
        page_table,
        extend_start,
        extend_lens,
        prefix_lens,
        sinks,
        out,
        lse,
        scale,
        soft_cap,
        window,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        DIM_PAD=padded(dim),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        PAGE=page,
        BLOCK=block_keys(row_bytes, tile.block_bytes),
        K_STRIDES=k_cache.stride()[:3],
        V_STRIDES=v_cache.stride()[:3],
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=2,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _visit(
    start,
    end,
    first,
    stop,
    query,
    place,
    keys,
    vals,
    table,
    scale,
    soft_cap,
    window,
    top,
    total,
    values,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
):
    """Takes the blocks from `start` to `end` into the running softmax of a tile.

    Unless MASKED every query of the tile sees every key of them.
    """
    for block in range(start, end, BLOCK):
        position = block + tl.arange(0, BLOCK)
        live = tl.full([BLOCK], True, tl.int1)
        if MASKED:
            live = (position >= first) & (position < stop)
        pages, places = locate(table, block, live, stop, PAGE, BLOCK)
        k = load_rows(keys, pages, places, live, K_STRIDES[0], K_STRIDES[1], DIM, DIM_PAD)
        v = load_rows(vals, pages, places, live, V_STRIDES[0], V_STRIDES[1], VALUE_DIM, VALUE_PAD)
        logits = base2_logits(query, k, scale, soft_cap)
        if MASKED:
            sees = live[None, :] & (position[None, :] <= place[:, None])
            if window is not None:
                sees = sees & (position[None, :] > place[:, None] - window)
            logits = tl.where(sees, logits, float("-inf"))
        top, total, values = softmax_step(logits, v, top, total, values)
    return top, total, values


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=[
        "page_table",
        "extend_start",
        "extend_lens",
        "prefix_lens",
        "sinks",
        "lse",
    ],
)
def _extend_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    extend_start,
    extend_lens,
    prefix_lens,
    sinks,
    out,
    lse,
    scale,
    soft_cap,
    window,
    table_stride,
    q_row_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of queries, one KV head, one sequence."""
    QUERIES: tl.constexpr = ROWS // GROUP
    begin(PDL)
    # Late tiles see the most keys: they start first, so that none of them is left alone at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    wait(PDL)  # lengths and page table are of this step too
    queries = tl.load(extend_lens + sequence)
    begins = tile * QUERIES
    if begins >= queries:
        return
    prefix = tl.load(prefix_lens + sequence)
    last = tl.minimum(begins + QUERIES, queries)  # one past the tile's last query

    member = tl.arange(0, ROWS)
    index = begins + member // GROUP
    head = kv_head * GROUP + member % GROUP
    exists = index < last
    token = (tl.load(extend_start + sequence) + index).to(tl.int64)
    column = tl.arange(0, DIM_PAD)
    q_offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + column[None, :]
    q_mask = exists[:, None] & (column < DIM)[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)  # [ROWS, DIM_PAD]

    place = prefix + index  # position of each query
    # Keys that some query of the tile sees: first to stop. Keys that all of them see, in whole
    # blocks: whole to partial; there nothing is masked.
    first, stop = 0, prefix + last
    whole = 0
    if window is not None:
        first = tl.maximum(prefix + begins - window + 1, 0)
        whole = tl.cdiv(tl.maximum(stop - window, 0), BLOCK) * BLOCK
    partial = tl.maximum((prefix + begins + 1) // BLOCK * BLOCK, whole)

    keys = k_cache + kv_head * K_STRIDES[2]
    vals = v_cache + kv_head * V_STRIDES[2]
    table = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    if window is not None:
        edge = first // BLOCK * BLOCK
        top, total, values = _visit(
            edge, whole, first, stop, query, place, keys, vals, table, scale, soft_cap, window,
            top, total, values, True, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
            K_STRIDES, V_STRIDES,
        )  # fmt: skip
    top, total, values = _visit(
        whole, partial, first, stop, query, place, keys, vals, table, scale, soft_cap, window,
        top, total, values, False, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
        K_STRIDES, V_STRIDES,
    )  # fmt: skip
    top, total, values = _visit(
        partial, stop, first, stop, query, place, keys, vals, table, scale, soft_cap, window,
        top, total, values, True, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
        K_STRIDES, V_STRIDES,
    )  # fmt: skip

    if sinks is not None:
        sink = tl.load(sinks + head)
        top, total, values = add_sink(sink, top, total, values)
    entry = token * (tl.num_programs(1) * GROUP) + head  # [ROWS] of [T, N]
    value_column = tl.arange(0, VALUE_PAD)
    out_offsets = entry[:, None] * VALUE_DIM + value_column[None, :]
    out_mask = exists[:, None] & (value_column < VALUE_DIM)[None, :]
    tl.store(out + out_offsets, divide(values, total).to(out.dtype.element_ty), mask=out_mask)
    if lse is not None:
        tl.store(lse + entry, base2_lse(top, total) * LN_2, mask=exists)
