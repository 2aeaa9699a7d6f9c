"""The programs of `decode_attention_triton`: one row, KV head and split; and the sum of splits.

With dependent launch a program may start while the kernels in front still run. It waits before it
reads q and the keys of this step. Lengths and page tables may be read before the wait only if they
are known to be there (`tables_ready`): then the program asks for its first pages to come to the L2
while the kernel in front still works. What is fetched so early is not used before the wait, and the
L2 is where all writes go, so it does not matter which slots are still being written.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels.attention_math_triton import (
    LN_2,
    add_sink,
    base2_lse,
    divide,
    load_rows,
    locate,
    logits_and_factor,
    softmax_step,
)
from headrace.kernels.fused_math_triton import begin, wait
from headrace.kernels.key_blocks_triton import prefetch_block


@triton.jit
def _cut(seq_lens, row, share, splits, window, BLOCK: tl.constexpr):
    """Of a row: first key seen, where its blocks begin, its end, number of runs, keys of a run."""
    end = tl.load(seq_lens + row)
    first = 0
    if window is not None:
        first = tl.maximum(end - window, 0)
    aligned = first // BLOCK * BLOCK
    runs = splits
    if share is not None:
        keys = tl.load(share)
        runs = tl.minimum(tl.maximum((end - aligned + keys // 2) // keys, 1), splits)
    return first, aligned, end, runs, tl.cdiv(tl.cdiv(end - aligned, runs), BLOCK) * BLOCK


@triton.jit
def _finish(
    top,
    total,
    values,
    head,
    exists,
    place,
    sinks,
    out,
    lse,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Writes the heads [M] that exist at `place` of [B, N]."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0)
        top, total, values = add_sink(sink, top, total, values)
    column = tl.arange(0, VALUE_PAD)
    mask = exists[:, None] & (column < VALUE_DIM)[None, :]
    result = divide(values, total).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * VALUE_DIM + column[None, :], result, mask=mask)
    if lse is not None:
        tl.store(lse + place, base2_lse(top, total) * LN_2, mask=exists)


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "share", "sinks", "lse"],
)
def decode_kernel(
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
    share,
    scale,
    soft_cap,
    window,
    table_stride,
    q_row_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    EARLY: tl.constexpr,
    TABLES_READY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row, one KV head, one split of the keys. Without `part_values` it is whole.

    The keys from the window's first to the row's last are cut into equal runs of whole blocks by
    the length on the device; a split past the end only says that it saw nothing. The KV heads of a
    row come one after another: a page's heads lie together, and are read together.
    """
    begin(PDL)
    if not TABLES_READY:
        wait(PDL)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    first, aligned, end, runs, run = _cut(seq_lens, row, share, splits, window, BLOCK)
    start = aligned + split * run
    stop = tl.minimum(start + run, end)

    table = page_table + row.to(tl.int64) * table_stride
    keys = k_cache + kv_head * K_STRIDES[2]
    vals = v_cache + kv_head * V_STRIDES[2]
    within = tl.arange(0, BLOCK)
    # Of a split without keys the first position is looked up; nothing is read there.
    live = (start + within >= first) & (start + within < stop)
    pages, _ = locate(table, tl.where(start < stop, start, 0), live, stop, PAGE, BLOCK)
    for part in tl.static_range(EARLY):
        block = start + part * BLOCK
        if block < stop:
            prefetch_block(
                table, block, stop, keys, vals, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
                K_STRIDES, V_STRIDES,
            )  # fmt: skip
    if TABLES_READY:
        wait(PDL)

    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    column = tl.arange(0, DIM_PAD)
    q_mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q_offsets = row.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride + column[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)  # [GROUP_PAD, DIM_PAD]

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    for block in range(start, stop, BLOCK):
        position = block + within
        live = (position >= first) & (position < stop)
        places = block % PAGE + within if PAGE >= BLOCK else (block + within) % PAGE
        k = load_rows(keys, pages, places, live, K_STRIDES[0], K_STRIDES[1], DIM, DIM_PAD)
        v = load_rows(vals, pages, places, live, V_STRIDES[0], V_STRIDES[1], VALUE_DIM, VALUE_PAD)
        # The next block's pages are looked up a step ahead: its loads then wait for nothing.
        ahead = tl.minimum(block + BLOCK, (stop - 1) // BLOCK * BLOCK)
        there = (ahead + within >= first) & (ahead + within < stop)
        pages, _ = locate(table, ahead, there, stop, PAGE, BLOCK)
        logits, factor = logits_and_factor(query, k, scale, soft_cap)
        logits = tl.where(live[None, :], logits * factor, float("-inf"))
        top, total, values = softmax_step(logits, v, top, total, values)

    place = row.to(tl.int64) * (tl.num_programs(0) * GROUP) + head  # [GROUP_PAD] of [B, N]
    exists = member < GROUP
    if part_values is None:
        _finish(
            top, total, values, head, exists, place, sinks, out, lse, VALUE_DIM, VALUE_PAD
        )  # fmt: skip
    elif runs > 1:
        entry = place * splits + split
        tl.store(part_lse + entry, base2_lse(top, total), mask=exists)
        if start < end:
            value_column = tl.arange(0, VALUE_PAD)
            part_offsets = entry[:, None] * VALUE_DIM + value_column[None, :]
            part_mask = exists[:, None] & (value_column < VALUE_DIM)[None, :]
            tl.store(part_values + part_offsets, divide(values, total), mask=part_mask)
    elif split == 0:
        _finish(
            top, total, values, head, exists, place, sinks, out, lse, VALUE_DIM, VALUE_PAD
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["splits", "window"],
    do_not_specialize_on_alignment=["seq_lens", "share", "sinks", "lse"],
)
def combine_kernel(
    part_values,
    part_lse,
    seq_lens,
    share,
    sinks,
    out,
    lse,
    splits,
    window,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TABLES_READY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row and query head. Weighs the splits' values by their sums."""
    begin(PDL)
    if not TABLES_READY:
        wait(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    runs = _cut(seq_lens, row, share, splits, window, KEYS)[3]
    if TABLES_READY:
        wait(PDL)
    if runs > 1:
        _combine(
            part_values, part_lse, sinks, out, lse, row.to(tl.int64) * heads + head, head, runs,
            splits, BLOCK, VALUE_DIM, VALUE_PAD,
        )  # fmt: skip


@triton.jit
def _combine(
    part_values,
    part_lse,
    sinks,
    out,
    lse,
    place,
    head,
    runs,
    splits,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    column = tl.arange(0, VALUE_PAD)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, VALUE_PAD], tl.float32)
    for block in range(0, runs, BLOCK):
        split = block + tl.arange(0, BLOCK)
        part = place * splits + split
        sums = tl.load(part_lse + part, mask=split < runs, other=float("-inf"))
        mask = (split < runs)[:, None] & (column < VALUE_DIM)[None, :]
        rows = tl.load(
            part_values + part[:, None] * VALUE_DIM + column[None, :], mask=mask, other=0.0
        )
        # Splits that saw nothing left their values unwritten.
        rows = tl.where((sums > float("-inf"))[:, None], rows, 0.0)
        new_top = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(sums - base)  # [BLOCK]
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        values = values * shrink[:, None] + tl.sum(rows * weights[:, None], 0)[None, :]
        top = new_top
    one = tl.arange(0, 1)
    _finish(
        top, total, values, head + one, one == 0, place + one, sinks, out, lse, VALUE_DIM, VALUE_PAD
    )  # fmt: skip
