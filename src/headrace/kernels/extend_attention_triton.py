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
    base2_lse,
    block_keys,
    check_layer,
    divide,
    dot,
    padded,
)
from headrace.kernels.fused_math_triton import begin, launch_options, wait
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned
from headrace.kernels.key_blocks_triton import first_pages, visit_block
from headrace.kernels.whole_blocks_triton import slots_of, takes_blocks

HOPPER_SHARED = 227 * 1024  # bytes of shared memory of a block
WHOLE_BLOCK = 64  # keys that a descriptor brings at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendTile:
    """What a program takes at once.

    Attributes:
        rows: heads of the group times queries. block_bytes: of K and V per pipeline stage.
        stages: blocks in flight, the one at work included, where nothing is masked.
        by_block: a block comes whole, by the tensor memory accelerator, and not row by row.
    """

    rows: int
    block_bytes: int
    warps: int
    stages: int = 2
    by_block: bool = False


def extend_tile(
    *, row_bytes: int, element: int, shared_memory: int, by_block: bool = False
) -> ExtendTile:
    """The tile of a model on a device, whatever the batch: it decides the order of additions.

    Measured on an H200 in bfloat16 (Triton 3.6, 2026-11-29), TFLOP/s at 8 x 1024, 1 x 8192, and
    1024 behind 7168 tokens: with 32 query and 8 KV heads of 128, 357, 481 and 504 by whole blocks,
    262, 402 and 367 row by row with the large tile; with 14 and 2 heads of 64, 249, 409 and 230
    against 237, 370 and 168. The tile for less shared memory took 0.7 to 0.8 of the large one's.

    Args:
        row_bytes: of a key and its value, padded; element: bytes of one number of them.
        shared_memory: bytes that a block may have.
        by_block: whether blocks of `WHOLE_BLOCK` keys may come by descriptors. Two programs then
            share a multiprocessor, so that one multiplies while the other exponentiates.
    """
    if element == 4:
        return ExtendTile(rows=32, block_bytes=32 * 1024, warps=4)
    if by_block and row_bytes <= 512 and shared_memory >= HOPPER_SHARED:
        block_bytes = WHOLE_BLOCK * row_bytes
        return ExtendTile(rows=64, block_bytes=block_bytes, warps=4, stages=3, by_block=True)
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
    covered: int | None = None,
    tile: ExtendTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """`attention_twins.paged_extend`; padding rows of `out` are likewise left as they were.

    Args:
        covered: leading rows of `q` that belong to sequences, where the host knows it. Those that
            a sequence's length on the device leaves out become 0 (-inf in `lse`), so that `out`
            may come uninitialised.
        tile: `extend_tile` chooses if absent.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    layer = LayerExtend(
        q,
        k_cache,
        v_cache,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tile=tile,
        pdl=pdl,
    )
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        out[covered or 0 :] = 0
    layer(
        q,
        page_table,
        extend_start,
        extend_lens,
        prefix_lens,
        max_extend=max_extend,
        out=out,
        lse=lse,
        covered=covered,
    )
    return out


class LayerExtend:
    """`paged_extend` of one layer, step after step: what its steps share is worked out once.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_extend`.

    Raises:
        UnsupportedError: as `paged_extend`.
    """

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        tile: ExtendTile | None = None,
        pdl: bool = False,
    ) -> None:
        check_layer(q, k_cache, v_cache, pdl=pdl)
        heads, dim = q.shape[1:]
        page, self._kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
        group = heads // self._kv_heads
        row_bytes = (padded(dim) + padded(value_dim)) * q.element_size()
        if tile is None:
            tile = extend_tile(
                row_bytes=row_bytes,
                element=q.element_size(),
                shared_memory=shared_memory(q.device),
                by_block=all(takes_blocks(x, WHOLE_BLOCK) for x in (k_cache, v_cache)),
            )
        rows, block = max(padded(group), tile.rows), block_keys(row_bytes, tile.block_bytes)
        by_block = tile.by_block and all(takes_blocks(x, block) for x in (k_cache, v_cache))
        self._queries = rows // group
        self._caches, self._sinks = (k_cache, v_cache), sinks
        self._habits = (
            slots_of(k_cache, block) if by_block else None,
            slots_of(v_cache, block) if by_block else None,
            scale,
            soft_cap,
            window,
        )
        constants = {
            "GROUP": group,
            "ROWS": rows,
            "DIM": dim,
            "DIM_PAD": padded(dim),
            "VALUE_DIM": value_dim,
            "VALUE_PAD": padded(value_dim),
            "PAGE": page,
            "BLOCK": block,
            "K_STRIDES": k_cache.stride()[:3],
            "V_STRIDES": v_cache.stride()[:3],
            "STAGES": tile.stages,
            "PDL": pdl,
        }
        self._launch = KeptLaunches(
            _extend_kernel, constants, num_warps=tile.warps, **launch_options(pdl)
        )

    def __call__(
        self,
        q: Tensor,
        page_table: Tensor,
        extend_start: Tensor,
        extend_lens: Tensor,
        prefix_lens: Tensor,
        *,
        max_extend: int,
        out: Tensor,
        lse: Tensor | None = None,
        covered: int | None = None,
    ) -> None:
        """Arguments: as of `paged_extend`; `out` is written."""
        batch, strides = extend_lens.shape[0], q.stride()
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        if batch == 0 or max_extend == 0 or q.shape[0] == 0:
            return
        self._launch(
            (strides, out.dtype, covered is None, aligned(q, out, lse)),
            (triton.cdiv(max_extend, self._queries), self._kv_heads, batch),
            q,
            *self._caches,
            page_table,
            extend_start,
            extend_lens,
            prefix_lens,
            self._sinks,
            out,
            lse,
            covered,
            *self._habits,
            page_table.stride(0),
            *strides[:2],
        )


@triton.jit
def _softmax_step(logits, factor, v, top, total, values):
    """`softmax_step` of logits times a factor above 0: multiplied and subtracted in one."""
    new_top = tl.maximum(top, tl.max(logits, 1) * factor)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits * factor - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    values = dot(weights.to(v.dtype), v, values * shrink[:, None])
    return new_top, total, values


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
    key_slots,
    value_slots,
    kv_head,
    table,
    page,
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
    STAGES: tl.constexpr,
):
    """Takes the blocks from `start` to `end` into the running softmax of a tile.

    Unless MASKED every query of the tile sees every key of them.
    """
    for block in tl.range(start, end, BLOCK, num_stages=2 if MASKED else STAGES):
        logits, factor, v, page = visit_block(
            block, end, first, stop, query, place, keys, vals, key_slots, value_slots, kv_head,
            table, page, scale, soft_cap, window, MASKED, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD,
            PAGE, BLOCK, K_STRIDES, V_STRIDES,
        )  # fmt: skip
        top, total, values = _softmax_step(logits, factor, v, top, total, values)
    return top, total, values


@triton.jit(
    do_not_specialize=["covered", "window", "table_stride"],
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
    covered,
    key_slots,
    value_slots,
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of queries, one KV head, one sequence."""
    QUERIES: tl.constexpr = ROWS // GROUP
    begin(PDL)
    # Late tiles see the most keys: they start first, so that none of them is left alone at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    wait(PDL)  # lengths and page table are of this step too
    begins = tile * QUERIES
    queries, start = tl.load(extend_lens + sequence), tl.load(extend_start + sequence)
    prefix = tl.load(prefix_lens + sequence)
    places = queries  # for queries, whether they exist or not
    if covered is not None:
        end = covered
        if sequence + 1 < tl.num_programs(2):
            end = tl.load(extend_start + sequence + 1)
        places = end - start
    if begins >= places:
        return
    last = tl.minimum(begins + QUERIES, queries)  # one past the tile's last query

    member = tl.arange(0, ROWS)
    index = begins + member // GROUP
    head = kv_head * GROUP + member % GROUP
    exists = index < last
    token = (start + index).to(tl.int64)
    column = tl.arange(0, DIM_PAD)
    q_offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + column[None, :]
    q_mask = exists[:, None] & (column < DIM)[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)  # [ROWS, DIM_PAD]

    place = prefix + index  # position of each query
    # Keys that some query of the tile sees: first to stop. Keys that all of them see, in whole
    # blocks: whole to partial; there nothing is masked.
    first, stop = 0, tl.where(begins < queries, prefix + last, 0)
    whole = 0
    if window is not None:
        first = tl.maximum(prefix + begins - window + 1, 0)
        whole = tl.cdiv(tl.maximum(stop - window, 0), BLOCK) * BLOCK
    partial = tl.maximum(tl.minimum(prefix + begins + 1, stop) // BLOCK * BLOCK, whole)

    keys = k_cache + kv_head * K_STRIDES[2]
    vals = v_cache + kv_head * V_STRIDES[2]
    table = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    edge = first // BLOCK * BLOCK
    edge_page, whole_page, partial_page = first_pages(
        table, key_slots, edge, whole, partial, stop, window, PAGE
    )
    if window is not None:
        top, total, values = _visit(
            edge, whole, first, stop, query, place, keys, vals,
            key_slots, value_slots, kv_head, table, edge_page, scale, soft_cap, window,
            top, total, values, True, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
            K_STRIDES, V_STRIDES, STAGES,
        )  # fmt: skip
    top, total, values = _visit(
        whole, partial, first, stop, query, place, keys, vals,
        key_slots, value_slots, kv_head, table, whole_page, scale, soft_cap, window,
        top, total, values, False, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
        K_STRIDES, V_STRIDES, STAGES,
    )  # fmt: skip
    top, total, values = _visit(
        partial, stop, first, stop, query, place, keys, vals,
        key_slots, value_slots, kv_head, table, partial_page, scale, soft_cap, window,
        top, total, values, True, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
        K_STRIDES, V_STRIDES, STAGES,
    )  # fmt: skip

    if sinks is not None:
        sink = tl.load(sinks + head)
        top, total, values = add_sink(sink, top, total, values)
    entry = token * (tl.num_programs(1) * GROUP) + head  # [ROWS] of [T, N]
    value_column = tl.arange(0, VALUE_PAD)
    out_offsets = entry[:, None] * VALUE_DIM + value_column[None, :]
    result, sums = divide(values, total), base2_lse(top, total) * LN_2
    written = exists
    if covered is not None:
        result = tl.where(exists[:, None], result, 0.0)
        sums = tl.where(exists, sums, float("-inf"))
        written = (index < begins + QUERIES) & (index < places)
    out_mask = written[:, None] & (value_column < VALUE_DIM)[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=out_mask)
    if lse is not None:
        tl.store(lse + entry, sums, mask=written)
