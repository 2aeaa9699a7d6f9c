"""Paged attention whose rows have the same bits in any batch: one kernel for decode and extend.

A tile holds the query heads of one KV head for some queries of a sequence, 64 rows of a warp
group's instruction whether they exist or not, so that a row is multiplied alike in a step of one
token and in a prompt. It takes blocks of keys from their absolute positions in ascending order, and
adds the sums of splits, whose bounds are absolute too (`invariant_splits`), in ascending order. A
program of a prompt goes through all splits of its tile; where few rows decode, programs take some
splits of a row each, leave the sum of every split, and another kernel adds them by the same
formula. Blocks and splits that a row does not see leave its bits as they are.

Meaning and shapes: `attention_twins`. Dependent launch and `tables_ready`: as in
`decode_attention_triton`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_math_triton import (
    LN_2,
    LOG2_E,
    base2_lse,
    block_keys,
    check_layer,
    divide,
    load_rows,
    locate,
    padded,
)
from headrace.kernels.extend_attention_triton import HOPPER_SHARED, shared_memory
from headrace.kernels.fused_math_triton import begin, launch_options, prefetch, wait
from headrace.kernels.invariant_attention_math_triton import (
    empty,
    logits_and_factor,
    split_of,
    split_start,
    take_block,
    take_split,
)
from headrace.kernels.invariant_splits import (
    FIRST_KEYS,
    SplitScratch,
    most_splits,
    runs_of,
)
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned
from headrace.kernels.whole_blocks_triton import load_block, slots_of, takes_blocks

ROWS = 64  # of a tile: those of a warp group's instruction
EXACT_ROWS = 16  # in float32, whose products are no tensor core's
BLOCK_BYTES, STAGES = 32 * 1024, 3  # of K and V of a block; blocks in flight
SMALL_BYTES, SMALL_STAGES = 16 * 1024, 2  # the same with less shared memory than Hopper's
EARLY = 2  # blocks that a program asks for while the kernel in front works
WARPS, COMBINE_WARPS = 4, 4
UNROLLED = 8  # splits whose sums the combine kernel asks for at once


class InvariantAttention:
    """Attention of one layer, step after step, over its pages.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_extend`.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
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
        pdl: bool = False,
    ) -> None:
        check_layer(q, k_cache, v_cache, pdl=pdl)
        # The interpreter, on a CPU, does as Hopper does. What decides the order of sums follows the
        # model and the device.
        large = q.device.type == "cpu" or shared_memory(q.device) >= HOPPER_SHARED
        self._caches, self._heads, dim = (k_cache, v_cache), *q.shape[1:]
        self._page, self._kv_heads, self._value_dim = k_cache.shape[1], *v_cache.shape[2:]
        self._window, self._sinks, self._pdl = window, sinks, pdl
        self._stages = STAGES if large else SMALL_STAGES
        group = self._heads // self._kv_heads
        row_bytes = (padded(dim) + padded(self._value_dim)) * q.element_size()
        block = min(64, block_keys(row_bytes, BLOCK_BYTES if large else SMALL_BYTES))
        assert FIRST_KEYS % block == 0
        rows = max(padded(group), EXACT_ROWS if q.element_size() == 4 else ROWS)
        halves = q.element_size() == 2
        by_block = large and halves and all(takes_blocks(x, block) for x in self._caches)
        self._queries = rows // group
        self._habits = (
            slots_of(k_cache, block) if by_block else None,
            slots_of(v_cache, block) if by_block else None,
            scale,
            soft_cap,
            window,
        )
        self._values = {"VALUE_DIM": self._value_dim, "VALUE_PAD": padded(self._value_dim)}
        self._constants = {
            "GROUP": group,
            "ROWS": rows,
            "DIM": dim,
            "DIM_PAD": padded(dim),
            **self._values,
            "PAGE": self._page,
            "BLOCK": block,
            "K_STRIDES": k_cache.stride()[:3],
            "V_STRIDES": v_cache.stride()[:3],
            "GROWS": window is None,
        }
        self._launches: dict[tuple[bool, bool], KeptLaunches] = {}
        self._combines: dict[bool, KeptLaunches] = {}

    def decode(
        self,
        q: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        max_seq_len: int | None = None,
        runs: int | None = None,
        scratch: SplitScratch | None = None,
        tables_ready: bool = False,
    ) -> None:
        """`attention_twins.paged_decode` into `out`.

        Args:
            max_seq_len: host bound on `seq_lens`; the table's capacity if absent.
            runs: programs a row is spread over; `runs_of` chooses if absent.
            scratch: where the splits of several runs meet; allocated if absent.
            tables_ready: with `pdl`, promises that page tables and lengths are complete before
                anything of this call can start.
        """
        batch = q.shape[0]
        if batch == 0:
            return
        splits = most_splits(max_seq_len or page_table.shape[1] * self._page, window=self._window)
        if runs is None:
            runs = runs_of(batch=batch, kv_heads=self._kv_heads, splits=splits)
        parts: tuple[Tensor | None, ...] = (None, None)
        if runs > 1:
            sizes = {"batch": batch, "heads": self._heads, "splits": splits}
            sizes["value_dim"] = self._value_dim
            if scratch is None:
                scratch = SplitScratch.allocate(**sizes, device=q.device)
            assert scratch.holds(**sizes)
            parts = scratch.values, scratch.sums
        lengths = (None, None, seq_lens)
        grid = (self._kv_heads, batch, runs)
        self._launch(grid, q, page_table, lengths, out, lse, parts, splits, None, tables_ready)
        if runs > 1:
            self._combine(batch, parts, splits, seq_lens, out, lse, tables_ready)

    def extend(
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
        """`attention_twins.paged_extend` into `out`; `covered` as in `extend_attention_triton`."""
        batch = extend_lens.shape[0]
        if batch == 0 or max_extend == 0 or q.shape[0] == 0:
            return
        lengths = (extend_start, extend_lens, prefix_lens)
        grid = (triton.cdiv(max_extend, self._queries), self._kv_heads, batch)
        self._launch(grid, q, page_table, lengths, out, lse, (None, None), 1, covered, False)

    def _launch(
        self,
        grid: tuple[int, int, int],
        q: Tensor,
        page_table: Tensor,
        lengths: tuple[Tensor | None, Tensor | None, Tensor],
        out: Tensor,
        lse: Tensor | None,
        parts: tuple[Tensor | None, ...],
        splits: int,
        covered: int | None,
        tables_ready: bool,
    ) -> None:
        strides, decode = q.stride(), lengths[0] is None
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        launch = self._launches.get((decode, tables_ready))
        if launch is None:
            early = EARLY if decode and tables_ready and self._pdl else 0
            own = {"STAGES": self._stages, "DECODE": decode, "EARLY": early}
            promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
            launch = self._launches[decode, tables_ready] = KeptLaunches(
                _attend_kernel,
                self._constants | own | promises,
                num_warps=WARPS,
                **launch_options(self._pdl),
            )
        launch(
            (strides, out.dtype, covered is None, aligned(q, out, lse, *parts)),
            grid,
            q,
            *self._caches,
            page_table,
            *lengths,
            self._sinks,
            out,
            lse,
            *parts,
            covered,
            *self._habits,
            page_table.stride(0),
            splits,
            *strides[:2],
        )

    def _combine(
        self,
        batch: int,
        parts: tuple[Tensor | None, ...],
        splits: int,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None,
        tables_ready: bool,
    ) -> None:
        combine = self._combines.get(tables_ready)
        if combine is None:
            own = {"UNROLLED": UNROLLED, "GROWS": self._window is None}
            promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
            combine = self._combines[tables_ready] = KeptLaunches(
                _combine_kernel,
                self._values | own | promises,
                num_warps=COMBINE_WARPS,
                **launch_options(self._pdl),
            )
        combine(
            (out.dtype, aligned(out, lse, *parts)),
            (batch, self._heads, 1),
            *parts,
            seq_lens,
            self._sinks,
            out,
            lse,
            splits,
            self._window,
        )


@triton.jit
def _finish(
    top,
    total,
    values,
    head,
    seen,
    written,
    place,
    sinks,
    out,
    lse,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Writes heads [M] at `place` of [T, N]; those that have not seen anything are 0."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=seen, other=0.0)
        some = total > 0.0  # one more logit in the denominator of rows that saw a key
        sink = tl.where(some, sink * LOG2_E, float("-inf"))
        top, total, values = take_split(
            top, total, values, sink, some.to(tl.float32), tl.zeros_like(values)
        )
    column = tl.arange(0, VALUE_PAD)
    mask = written[:, None] & (column < VALUE_DIM)[None, :]
    # The sign of a zero tells how many blocks were passed over: + 0 makes it one.
    result = tl.where(seen[:, None], divide(values, total) + 0.0, 0.0)
    place = place.to(tl.int64)
    target = out + place[:, None] * VALUE_DIM + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        sums = tl.where(seen, base2_lse(top, total) * LN_2, float("-inf"))
        tl.store(lse + place, sums, mask=written)


@triton.jit
def _leave(
    top,
    total,
    values,
    entry,
    entries,
    exists,
    part_values,
    part_sums,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """The sum of one split, for `_combine_kernel`; entry: [M] of [B, N, S]."""
    column = tl.arange(0, VALUE_PAD)
    mask = exists[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(part_values + entry[:, None] * VALUE_DIM + column[None, :], values, mask=mask)
    tl.store(part_sums + entry, top, mask=exists)
    tl.store(part_sums + entries + entry, total, mask=exists)


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
    # A block by a descriptor lies in one page, at first `page`; the next is looked up meanwhile.
    for block in tl.range(start, end, BLOCK, num_stages=2 if MASKED else STAGES):
        position = block + tl.arange(0, BLOCK)
        live = tl.full([BLOCK], True, tl.int1)
        if MASKED:
            live = (position >= first) & (position < stop)
        if key_slots is None:
            pages, places = locate(table, block, live, stop, PAGE, BLOCK)
            k = load_rows(keys, pages, places, live, K_STRIDES[0], K_STRIDES[1], DIM, DIM_PAD)
            v = load_rows(
                vals, pages, places, live, V_STRIDES[0], V_STRIDES[1], VALUE_DIM, VALUE_PAD
            )
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
def _sweep(
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
    # All pages that loops begin with are looked up here, so that none of them waits.
    edge_page, whole_page, partial_page = 0, 0, 0
    if key_slots is not None:
        if window is not None:
            edge_page = tl.load(table + edge // PAGE, mask=edge < whole, other=0)
        whole_page = tl.load(table + whole // PAGE, mask=whole < partial, other=0)
        partial_page = tl.load(table + partial // PAGE, mask=partial < stop, other=0)
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


@triton.jit
def _queries_of(
    extend_start,
    extend_lens,
    prefix_lens,
    sequence,
    sequences,
    covered,
    DECODE: tl.constexpr,
):
    """Of a sequence: its first token, number of queries, places for queries, keys in front."""
    if DECODE:
        # `prefix_lens` are the lengths, of which the query is the last.
        start, prefix = sequence, tl.load(prefix_lens + sequence) - 1
        queries = tl.where(prefix >= 0, 1, 0)
        places = queries * 0 + 1
    else:
        start, queries = tl.load(extend_start + sequence), tl.load(extend_lens + sequence)
        prefix, places = tl.load(prefix_lens + sequence), queries
        if covered is not None:
            end = covered
            if sequence + 1 < sequences:
                end = tl.load(extend_start + sequence + 1)
            places = end - start
    return start, queries, places, prefix


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
def _attend_kernel(
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
    start, queries, places, prefix = _queries_of(
        extend_start, extend_lens, prefix_lens, sequence, sequences, covered, DECODE
    )
    if begins >= places:
        return
    last = tl.minimum(begins + QUERIES, queries)  # one past the tile's last query

    # Keys that some query of the tile sees: first to stop. Keys that all of them see, in whole
    # blocks: whole to partial; there nothing is masked.
    first, stop = 0, tl.where(begins < queries, prefix + last, 0)
    whole = 0
    if window is not None:
        first = tl.minimum(tl.maximum(prefix + begins - window + 1, 0), stop)
        whole = tl.cdiv(tl.maximum(stop - window, 0), BLOCK) * BLOCK
    partial = tl.maximum(tl.minimum(prefix + begins + 1, stop) // BLOCK * BLOCK, whole)
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
            within = tl.arange(0, BLOCK)
            pages, spots = locate(table, block, block + within < stop, stop, PAGE, BLOCK)
            lines = pages.to(tl.int64) * K_STRIDES[0] + spots * K_STRIDES[1]
            prefetch(keys + lines, DIM, max(DIM_PAD, 64))
            lines = pages.to(tl.int64) * V_STRIDES[0] + spots * V_STRIDES[1]
            prefetch(vals + lines, VALUE_DIM, max(VALUE_PAD, 64))
    if TABLES_READY:
        wait(PDL)

    member = tl.arange(0, ROWS)
    index = begins + member // GROUP
    head = kv_head * GROUP + member % GROUP
    written = (member < QUERIES * GROUP) & (index < tl.minimum(begins + QUERIES, places))
    exists = (member < QUERIES * GROUP) & (index < last)
    token = (start + index).to(tl.int64)
    column = tl.arange(0, DIM_PAD)
    q_offsets = token[:, None] * q_row_stride + head[:, None] * q_head_stride + column[None, :]
    q_mask = exists[:, None] & (column < DIM)[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0)  # [ROWS, DIM_PAD]
    place = prefix + index  # position of each query
    target = token * (kv_heads * GROUP) + head  # [ROWS] of [T, N]
    entries = sequences.to(tl.int64) * (kv_heads * GROUP) * most_splits
    entry = target * most_splits - first_split  # and its split: of [B, N, S]

    if FOLDS:
        top, total, values = _sweep(
            edge, whole, partial, stop, first, split, query, place, keys, vals,
            key_slots, value_slots, kv_head, table, scale, soft_cap, window,
            FOLDS, ROWS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES,
            GROWS, STAGES,
        )  # fmt: skip
        _finish(
            top, total, values, head, exists, written, target, sinks, out, lse, VALUE_DIM, VALUE_PAD
        )  # fmt: skip
    else:
        for step in range(end_split - split):
            own = split + step
            begin_keys = tl.maximum(edge, split_start(own, GROWS))
            end_keys = tl.minimum(stop, split_start(own + 1, GROWS))
            top, total, values = _sweep(
                begin_keys,
                tl.minimum(tl.maximum(whole, begin_keys), end_keys),
                tl.minimum(tl.maximum(partial, begin_keys), end_keys),
                end_keys, first, own, query, place, keys, vals,
                key_slots, value_slots, kv_head, table, scale, soft_cap, window,
                FOLDS, ROWS, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, PAGE, BLOCK, K_STRIDES, V_STRIDES,
                GROWS, STAGES,
            )  # fmt: skip
            _leave(
                top, total, values, entry + own, entries, exists, part_values, part_sums,
                VALUE_DIM, VALUE_PAD,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["most_splits", "window"],
    do_not_specialize_on_alignment=["seq_lens", "sinks", "lse"],
)
def _combine_kernel(
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
    _finish(
        top, total, values, head + one, end > one, one == 0, place + one, sinks, out, lse,
        VALUE_DIM, VALUE_PAD,
    )  # fmt: skip
