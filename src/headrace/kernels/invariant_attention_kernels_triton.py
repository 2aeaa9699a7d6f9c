"""The programs of `invariant_attention`: tiles of queries, and the sums of splits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels.fused_math_triton import begin, wait
from headrace.kernels.invariant_attention_math_triton import (
    empty,
    finish,
    leave,
    split_of,
    split_start,
    take_split,
)
from headrace.kernels.invariant_sweep_triton import sweep
from headrace.kernels.key_blocks_triton import prefetch_block
from headrace.kernels.query_tiles_triton import load_queries, places_of, seen_keys


@triton.jit(
    do_not_specialize=["covered", "window", "table_stride", "most_splits"],
    do_not_specialize_on_alignment=[
        "page_table",
        "extend_start",
        "extend_lens",
        "prefix_lens",
        "sinks",
        "lse",
    ],
)
def attend_kernel(
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
    part_values,
    part_sums,
    covered,
    key_slots,
    value_slots,
    scale,
    soft_cap,
    window,
    table_stride,
    most_splits,
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
    GROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DECODE: tl.constexpr,
    EARLY: tl.constexpr,
    TABLES_READY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a tile of queries, one KV head, one sequence, and all splits or a run of them.

    In decode a tile is one query, and the KV heads of a row come one after another: a page's heads
    lie together, and are read together.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    begin(PDL)
    if not TABLES_READY:
        wait(PDL)
    if DECODE:
        tile, kv_head, sequence, run = 0, tl.program_id(0), tl.program_id(1), tl.program_id(2)
        kv_heads, sequences, runs = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    else:
        # Late tiles see the most keys: they start first, so that none is left alone at the end.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head, sequence, run = tl.program_id(1), tl.program_id(2), 0
        kv_heads, sequences, runs = tl.num_programs(1), tl.num_programs(2), 1
    begins = tile * QUERIES
    if DECODE:
        # `prefix_lens` are the lengths, of which the query is the last.
        start, prefix = sequence, tl.load(prefix_lens + sequence) - 1
        queries = tl.where(prefix >= 0, 1, 0)
        places = queries * 0 + 1
    else:
        start, queries = tl.load(extend_start + sequence), tl.load(extend_lens + sequence)
        prefix = tl.load(prefix_lens + sequence)
        followed = sequence + 1 < sequences
        places = places_of(queries, start, extend_start, sequence, followed, covered)
    if begins >= places:
        return
    last = tl.minimum(begins + QUERIES, queries)  # one past the tile's last query

    first, stop, whole, partial = seen_keys(begins, last, queries, prefix, window, BLOCK)
    if window is not None:
        first = tl.minimum(first, stop)
    edge = first // BLOCK * BLOCK

    # The splits of the row, and those of the program's run: split to end_split.
    first_split = split_of(edge, GROWS)
    split, end_split = first_split, first_split
    FOLDS: tl.constexpr = part_values is None
    if not FOLDS:
        if stop > edge:
            end_split = split_of(stop - 1, GROWS) + 1
        share = tl.cdiv(end_split - first_split, runs)
        split = first_split + run * share
        end_split = tl.minimum(split + share, end_split)
        if split >= end_split:
            if TABLES_READY:
                wait(PDL)
            return

    table = page_table + sequence.to(tl.int64) * table_stride
    keys = k_cache + kv_head * K_STRIDES[2]
    vals = v_cache + kv_head * V_STRIDES[2]
    for part in tl.static_range(EARLY):
        block = tl.maximum(edge, split_start(split, GROWS)) + part * BLOCK
        if block < stop:
            prefetch_block(
                table, block, stop, keys, vals, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK,
                K_STRIDES, V_STRIDES,
            )  # fmt: skip
    if TABLES_READY:
        wait(PDL)

    member = tl.arange(0, ROWS)
    index = begins + member // GROUP
    head = kv_head * GROUP + member % GROUP
    written = (member < QUERIES * GROUP) & (index < tl.minimum(begins + QUERIES, places))
    exists = (member < QUERIES * GROUP) & (index < last)
    token = (start + index).to(tl.int64)
    query = load_queries(q, token, head, exists, q_row_stride, q_head_stride, DIM, DIM_PAD)
    place = prefix + index  # position of each query
    target = token * (kv_heads * GROUP) + head  # [ROWS] of [T, N]
    entries = sequences.to(tl.int64) * (kv_heads * GROUP) * most_splits
    entry = target * most_splits - first_split  # and its split: of [B, N, S]

    if FOLDS:
        top, total, values = sweep(
            edge, whole, partial, stop, first, split, query, place, keys, vals,
            key_slots, value_slots, kv_head, table, scale, soft_cap, window,
            FOLDS, ROWS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES,
            GROWS, STAGES,
        )  # fmt: skip
        finish(
            top, total, values, head, exists, written, target, sinks, out, lse, VALUE_DIM, VALUE_PAD
        )  # fmt: skip
    else:
        for step in range(end_split - split):
            own = split + step
            begin_keys = tl.maximum(edge, split_start(own, GROWS))
            end_keys = tl.minimum(stop, split_start(own + 1, GROWS))
            top, total, values = sweep(
                begin_keys,
                tl.minimum(tl.maximum(whole, begin_keys), end_keys),
                tl.minimum(tl.maximum(partial, begin_keys), end_keys),
                end_keys, first, own, query, place, keys, vals,
                key_slots, value_slots, kv_head, table, scale, soft_cap, window,
                FOLDS, ROWS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES,
                GROWS, STAGES,
            )  # fmt: skip
            leave(
                top, total, values, entry + own, entries, exists, part_values, part_sums,
                VALUE_DIM, VALUE_PAD,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["most_splits", "window"],
    do_not_specialize_on_alignment=["seq_lens", "sinks", "lse"],
)
def combine_kernel(
    part_values,
    part_sums,
    seq_lens,
    sinks,
    out,
    lse,
    most_splits,
    window,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    UNROLLED: tl.constexpr,
    GROWS: tl.constexpr,
    TABLES_READY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row and query head. Adds the splits that programs of decode have left."""
    begin(PDL)
    if not TABLES_READY:
        wait(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    end = tl.load(seq_lens + row)
    first = 0
    if window is not None:
        first = tl.maximum(end - window, 0)
    count = 0
    if end > 0:
        count = split_of(end - 1, GROWS) + 1 - split_of(first, GROWS)
    if TABLES_READY:
        wait(PDL)
    place = row.to(tl.int64) * heads + head
    entries = tl.num_programs(0).to(tl.int64) * heads * most_splits
    one, column = tl.arange(0, 1), tl.arange(0, VALUE_PAD)
    top, total, values = empty(1, VALUE_PAD)
    for block in range(0, count, UNROLLED):
        for each in tl.static_range(UNROLLED):
            split = block + each + one  # [1]
            live, entry = split < count, place * most_splits + split
            split_top = tl.load(part_sums + entry, mask=live, other=float("-inf"))
            split_total = tl.load(part_sums + entries + entry, mask=live, other=0.0)
            mask = live[:, None] & (column < VALUE_DIM)[None, :]
            from_here = part_values + entry[:, None] * VALUE_DIM + column[None, :]
            split_values = tl.load(from_here, mask=mask, other=0.0)
            top, total, values = take_split(
                top, total, values, split_top, split_total, split_values
            )
    finish(
        top, total, values, head + one, end > one, one == 0, place + one, sinks, out, lse,
        VALUE_DIM, VALUE_PAD,
    )  # fmt: skip
