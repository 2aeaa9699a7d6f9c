"""The program of `extend_attention_triton`: one tile of queries, one KV head, one sequence."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels.attention_math_triton import LN_2, add_sink, base2_lse, divide, dot
from headrace.kernels.fused_math_triton import begin, wait
from headrace.kernels.key_blocks_triton import first_pages, visit_block
from headrace.kernels.query_tiles_triton import load_queries, places_of, seen_keys


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
def extend_kernel(
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
    followed = sequence + 1 < tl.num_programs(2)
    places = places_of(queries, start, extend_start, sequence, followed, covered)
    if begins >= places:
        return
    last = tl.minimum(begins + QUERIES, queries)  # one past the tile's last query

    member = tl.arange(0, ROWS)
    index = begins + member // GROUP
    head = kv_head * GROUP + member % GROUP
    exists = index < last
    token = (start + index).to(tl.int64)
    query = load_queries(q, token, head, exists, q_row_stride, q_head_stride, DIM, DIM_PAD)

    place = prefix + index  # position of each query
    first, stop, whole, partial = seen_keys(begins, last, queries, prefix, window, BLOCK)
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
