"""One block of keys as a tile of queries meets it: asked for, read from its page, multiplied,
masked.

What follows, the running softmax and the order of its sums, is the caller's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels.attention_math_triton import load_rows, locate, logits_and_factor
from headrace.kernels.fused_math_triton import prefetch
from headrace.kernels.whole_blocks_triton import load_block


@triton.jit
def prefetch_block(
    table,
    block,
    stop,
    keys,
    vals,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
):
    """Asks for the keys and values from `block` on to come to the L2; the first must exist."""
    live = block + tl.arange(0, BLOCK) < stop
    pages, places = locate(table, block, live, stop, PAGE, BLOCK)
    lines = pages.to(tl.int64) * K_STRIDES[0] + places * K_STRIDES[1]
    prefetch(keys + lines, DIM, max(DIM_PAD, 64))
    lines = pages.to(tl.int64) * V_STRIDES[0] + places * V_STRIDES[1]
    prefetch(vals + lines, VALUE_DIM, max(VALUE_PAD, 64))


@triton.jit
def first_pages(table, key_slots, edge, whole, partial, stop, window, PAGE: tl.constexpr):
    """The pages that the runs of blocks from `edge`, `whole` and `partial` on begin with, where
    blocks are read by descriptor. They are looked up together, so that no run waits for its own."""
    edge_page, whole_page, partial_page = 0, 0, 0
    if key_slots is not None:
        if window is not None:
            edge_page = tl.load(table + edge // PAGE, mask=edge < whole, other=0)
        whole_page = tl.load(table + whole // PAGE, mask=whole < partial, other=0)
        partial_page = tl.load(table + partial // PAGE, mask=partial < stop, other=0)
    return edge_page, whole_page, partial_page


@triton.jit
def visit_block(
    block,
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
    """Logits of the keys from `block` on, the factor that brings them to base 2, their values, and
    the page of the next block.

    Unless MASKED every query of the tile sees every key. A block by a descriptor lies in one page,
    `page`; that of the next, if there is one before `end`, is looked up meanwhile.
    """
    position = block + tl.arange(0, BLOCK)
    live = tl.full([BLOCK], True, tl.int1)
    if MASKED:
        live = (position >= first) & (position < stop)
    if key_slots is None:
        pages, places = locate(table, block, live, stop, PAGE, BLOCK)
        k = load_rows(keys, pages, places, live, K_STRIDES[0], K_STRIDES[1], DIM, DIM_PAD)
        v = load_rows(vals, pages, places, live, V_STRIDES[0], V_STRIDES[1], VALUE_DIM, VALUE_PAD)
    else:
        k = load_block(key_slots, page, block % PAGE, kv_head, K_STRIDES)
        v = load_block(value_slots, page, block % PAGE, kv_head, V_STRIDES)
        page = tl.load(table + (block + BLOCK) // PAGE, mask=block + BLOCK < end, other=0)
        if MASKED:
            v = tl.where(live[:, None], v, 0.0)  # 0 times NaN would be NaN
    logits, factor = logits_and_factor(query, k, scale, soft_cap)
    if MASKED:
        sees = live[None, :] & (position[None, :] <= place[:, None])
        if window is not None:
            sees = sees & (position[None, :] > place[:, None] - window)
        logits = tl.where(sees, logits, float("-inf"))
    return logits, factor, v, page
