"""A tile of queries on its way through the keys: blocks in their order, splits in theirs."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels.invariant_attention_math_triton import (
    empty,
    split_start,
    take_block,
    take_split,
)
from headrace.kernels.key_blocks_triton import first_pages, visit_block


@triton.jit
def _visit(
    start,
    end,
    first,
    stop,
    split,
    ends,
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
    all_top,
    all_total,
    all_values,
    MASKED: tl.constexpr,
    FOLDS: tl.constexpr,
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
):
    """Takes the blocks from `start` to `end` into the running softmax of the split at work; with
    FOLDS each split that ends with one of them (at `ends`) is taken into the sum of splits.

    Unless MASKED every query of the tile sees every key of them.
    """
    for block in tl.range(start, end, BLOCK, num_stages=2 if MASKED else STAGES):
        logits, factor, v, page = visit_block(
            block, end, first, stop, query, place, keys, vals, key_slots, value_slots, kv_head,
            table, page, scale, soft_cap, window, MASKED, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD,
            PAGE, BLOCK, K_STRIDES, V_STRIDES,
        )  # fmt: skip
        top, total, values = take_block(logits, factor, v, top, total, values)
        if FOLDS:  # noqa: SIM102 (a constant, and a value on the device)
            if block + BLOCK == ends:
                all_top, all_total, all_values = take_split(
                    all_top, all_total, all_values, top, total, values
                )
                top, total, values = empty(ROWS, VALUE_PAD)
                split += 1
                ends = split_start(split + 1, GROWS)
    return split, ends, top, total, values, all_top, all_total, all_values


@triton.jit
def sweep(
    edge,
    whole,
    partial,
    stop,
    first,
    split,
    query,
    place,
    keys,
    vals,
    key_slots,
    value_slots,
    kv_head,
    table,
    scale,
    soft_cap,
    window,
    FOLDS: tl.constexpr,
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
):
    """The sum over the blocks from `edge` to `stop`, masked before `whole` and from `partial` on:
    of all their splits, or without FOLDS as those of one. `split`: the one that `edge` lies in."""
    edge_page, whole_page, partial_page = first_pages(
        table, key_slots, edge, whole, partial, stop, window, PAGE
    )
    ends = split_start(split + 1, GROWS)
    top, total, values = empty(ROWS, VALUE_PAD)
    all_top, all_total, all_values = empty(ROWS, VALUE_PAD)
    if window is not None:
        split, ends, top, total, values, all_top, all_total, all_values = _visit(
            edge, whole, first, stop, split, ends, query, place, keys, vals,
            key_slots, value_slots, kv_head, table, edge_page, scale, soft_cap, window,
            top, total, values, all_top, all_total, all_values, True, FOLDS, ROWS, DIM, DIM_PAD,
            VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES, GROWS, STAGES,
        )  # fmt: skip
    split, ends, top, total, values, all_top, all_total, all_values = _visit(
        whole, partial, first, stop, split, ends, query, place, keys, vals,
        key_slots, value_slots, kv_head, table, whole_page, scale, soft_cap, window,
        top, total, values, all_top, all_total, all_values, False, FOLDS, ROWS, DIM, DIM_PAD,
        VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES, GROWS, STAGES,
    )  # fmt: skip
    split, ends, top, total, values, all_top, all_total, all_values = _visit(
        partial, stop, first, stop, split, ends, query, place, keys, vals,
        key_slots, value_slots, kv_head, table, partial_page, scale, soft_cap, window,
        top, total, values, all_top, all_total, all_values, True, FOLDS, ROWS, DIM, DIM_PAD,
        VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES, GROWS, STAGES,
    )  # fmt: skip
    if FOLDS:
        top, total, values = take_split(all_top, all_total, all_values, top, total, values)
    return top, total, values
