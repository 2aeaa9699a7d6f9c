"""Paged decode attention in Triton: split-KV, all query heads of a KV head in one program.

Reading K and V once is the whole cost of decode. The heads of a group share each block they read,
and a row's keys are cut over several programs when the batch alone does not fill the device
(flash-decoding, Dao et al., 2023). The last of a row's programs to arrive weighs the parts of all,
in the order of the splits, whoever came last. Meaning and shapes: `attention_twins.paged_decode`.

Runtime integers are not specialised, and strides of the pool are constants of a model: a model has
two variants (one split, several), however batches look.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

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
from headrace.kernels.decode_splits import DecodeScratch, decode_splits, multiprocessors
from headrace.kernels.fused_math_triton import begin, launch_options, next_power, wait
from headrace.kernels.sampling_math_triton import last_to_arrive

COMBINED_VALUES = 8192  # of the parts that a program reads at once: 64 registers of a thread
BLOCK_BYTES = 32 * 1024  # of K and V in flight per pipeline stage


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_seq_len: int | None = None,
    splits: int | None = None,
    scratch: DecodeScratch | None = None,
    pdl: bool = False,
) -> Tensor:
    """`attention_twins.paged_decode`, with the kernel's own arguments.

    Args:
        max_seq_len: host bound on `seq_lens` for the choice of splits; results do not depend on it.
        splits: programs per row and KV head; `decode_splits` chooses if absent. A constant makes a
            row's result the same bits in every batch.
        scratch: where splits meet; allocated if absent and needed.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    batch, heads, dim = q.shape
    page, kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    if out is None:
        out = q.new_empty(batch, heads, value_dim)
    check_arguments(q, k_cache, v_cache, [out, *([] if lse is None else [lse])], pdl=pdl)
    if batch == 0:
        return out
    if splits is None:
        splits = decode_splits(
            batch=batch,
            kv_heads=kv_heads,
            max_seq_len=max_seq_len or page_table.shape[1] * page,
            multiprocessors=multiprocessors(q.device),
            window=window,
        )
    need = {"batch": batch, "heads": heads, "splits": splits, "value_dim": value_dim}
    parts = None
    if splits > 1:
        parts = scratch or DecodeScratch.allocate(**need, device=q.device)
        assert parts.holds(**need)
    group = heads // kv_heads
    group_parts = next_power(group) * padded(value_dim)
    row_bytes = (padded(dim) + padded(value_dim)) * q.element_size()
    _decode_kernel[(batch, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        sinks,
        out,
        lse,
        None if parts is None else parts.values,
        None if parts is None else parts.lse,
        None if parts is None else parts.arrived,
        scale,
        soft_cap,
        window,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        GROUP=group,
        GROUP_PAD=padded(group),
        GROUP_PARTS=next_power(group),
        DIM=dim,
        DIM_PAD=padded(dim),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        PAGE=page,
        BLOCK=block_keys(row_bytes, BLOCK_BYTES),
        SPLITS_BLOCK=max(1, COMBINED_VALUES // group_parts),
        K_STRIDES=k_cache.stride()[:3],
        V_STRIDES=v_cache.stride()[:3],
        PDL=pdl,
        num_warps=4,
        num_stages=2,  # more stages take shared memory from the neighbours, and gain nothing
        **launch_options(pdl),
    )
    return out


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "sinks", "lse", "arrived"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    sinks,
    out,
    lse,
    part_values,
    part_lse,
    arrived,
    scale,
    soft_cap,
    window,
    table_stride,
    q_row_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row, one KV head, one split of the keys. Without `part_values` it is whole.

    The keys from the window's first to the row's last are cut into equal runs of whole blocks by
    the length on the device; a split past the end only says that it saw nothing, and arrives.
    """
    begin(PDL)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    wait(PDL)  # lengths and page table are of this step too
    end = tl.load(seq_lens + row)
    first = 0
    if window is not None:
        first = tl.maximum(end - window, 0)
    aligned = first // BLOCK * BLOCK
    run = tl.cdiv(tl.cdiv(end - aligned, splits), BLOCK) * BLOCK
    start = aligned + split * run
    stop = tl.minimum(start + run, end)

    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    column = tl.arange(0, DIM_PAD)
    q_mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q_offsets = row.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride + column[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)  # [GROUP_PAD, DIM_PAD]

    table = page_table + row.to(tl.int64) * table_stride
    keys = k_cache + kv_head * K_STRIDES[2]
    vals = v_cache + kv_head * V_STRIDES[2]
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    for block in range(start, stop, BLOCK):
        position = block + tl.arange(0, BLOCK)
        live = (position >= first) & (position < stop)
        pages, places = locate(table, block, live, stop, PAGE, BLOCK)
        k = load_rows(keys, pages, places, live, K_STRIDES[0], K_STRIDES[1], DIM, DIM_PAD)
        v = load_rows(vals, pages, places, live, V_STRIDES[0], V_STRIDES[1], VALUE_DIM, VALUE_PAD)
        logits = base2_logits(query, k, scale, soft_cap)
        logits = tl.where(live[None, :], logits, float("-inf"))
        top, total, values = softmax_step(logits, v, top, total, values)

    first_place = (row.to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP  # of [B, N]
    if part_values is None:
        _store_heads(
            first_place, kv_head, top, total, values, sinks, out, lse, GROUP, GROUP_PAD,
            VALUE_DIM, VALUE_PAD,
        )  # fmt: skip
    else:
        part = (first_place + member) * splits + split  # [GROUP_PAD] of [B, N, S]
        tl.store(part_lse + part, base2_lse(top, total), mask=member < GROUP)
        if start < end:
            value_column = tl.arange(0, VALUE_PAD)
            tl.store(
                part_values + part[:, None] * VALUE_DIM + value_column[None, :],
                divide(values, total),
                mask=(member < GROUP)[:, None] & (value_column < VALUE_DIM)[None, :],
            )
        if last_to_arrive(arrived + row * tl.num_programs(1) + kv_head, AXIS=2):
            all_top, all_total, all_values = _combine(
                part_values, part_lse, first_place, splits, GROUP, GROUP_PARTS, SPLITS_BLOCK,
                VALUE_DIM, VALUE_PAD,
            )  # fmt: skip
            _store_heads(
                first_place, kv_head, all_top, all_total, all_values, sinks, out, lse, GROUP,
                GROUP_PARTS, VALUE_DIM, VALUE_PAD,
            )  # fmt: skip


@triton.jit
def _combine(
    part_values,
    part_lse,
    first_place,
    splits,
    GROUP: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Weighs the splits' values by their sums, for the heads of one group.

    The parts come from other programs, by way of the L2 (`.cg`). Sums and values are asked for
    together; a split that saw nothing left its values unwritten, and they are replaced.
    """
    member = tl.arange(0, GROUP_PARTS)
    column = tl.arange(0, VALUE_PAD)
    top = tl.full([GROUP_PARTS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PARTS], tl.float32)
    values = tl.zeros([GROUP_PARTS, VALUE_PAD], tl.float32)
    for block in range(0, splits, SPLITS_BLOCK):
        split = block + tl.arange(0, SPLITS_BLOCK)[:, None]
        there = (split < splits) & (member < GROUP)[None, :]
        part = (first_place + member)[None, :] * splits + split  # [SPLITS_BLOCK, GROUP_PARTS]
        sums = tl.load(part_lse + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        rows = tl.load(
            part_values + part[:, :, None] * VALUE_DIM + column[None, None, :],
            mask=there[:, :, None] & (column < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        rows = tl.where((sums > float("-inf"))[:, :, None], rows, 0.0)
        new_top = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(sums - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        values = values * shrink[:, None] + tl.sum(rows * weights[:, :, None], 0)
        top = new_top
    return top, total, values


@triton.jit
def _store_heads(
    first_place,
    kv_head,
    top,
    total,
    values,
    sinks,
    out,
    lse,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Writes the results [ROWS, VALUE_PAD] of the heads of a group, sinks taken in."""
    member = tl.arange(0, ROWS)
    live = member < GROUP
    if sinks is not None:
        sink = tl.load(sinks + kv_head * GROUP + member, mask=live, other=0.0)
        top, total, values = add_sink(sink, top, total, values)
    place = first_place + member
    column = tl.arange(0, VALUE_PAD)
    result = divide(values, total).to(out.dtype.element_ty)
    out_mask = live[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] * VALUE_DIM + column[None, :], result, mask=out_mask)
    if lse is not None:
        tl.store(lse + place, base2_lse(top, total) * LN_2, mask=live)
