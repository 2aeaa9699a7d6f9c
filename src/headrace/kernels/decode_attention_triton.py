"""Paged decode attention in Triton: split-KV, all query heads of a KV head in one program.

Reading K and V once is the whole cost of decode. The heads of a group share each block they read,
and a row's keys are cut over several programs when the batch alone does not fill the device
(flash-decoding, Dao et al., 2023). Meaning and shapes: `attention_twins.paged_decode`.

Runtime integers are not specialised, and strides of the pool are constants of a model: a model has
two variants (one split, several) and the combine kernel, however batches look.

With dependent launch a program may start while the kernels in front still run. It waits before it
reads q and the keys of this step. Lengths and page tables may be read before the wait only if they
are known to be there (`tables_ready`): then the program asks for its first pages to come to the L2
while the kernel in front still works. What is fetched so early is not used before the wait, and the
L2 is where all writes go, so it does not matter which slots are still being written.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

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
    check_layer,
    divide,
    load_rows,
    locate,
    padded,
    softmax_step,
)
from headrace.kernels.decode_splits import DecodeScratch, decode_splits, multiprocessors
from headrace.kernels.fused_math_triton import begin, launch_options, prefetch, wait
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned

COMBINE_BLOCK = 16  # splits that the combine kernel reads at once
COMBINE_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """What a program of the decode kernel takes at once; decides the order of additions.

    Attributes:
        block_bytes: of K and V per pipeline stage. warps, stages: of the program.
        early: blocks asked for before the wait, where the tables are ready.
    """

    block_bytes: int
    warps: int
    stages: int
    early: int


# Few programs must each keep much in flight; many do that together, and want the shared memory.
# Measured on an H200, bfloat16, 32 query and 8 KV heads of 128, context 1,056, us a layer by the
# deep and the shallow tile: 32 rows 35.8 and 42.3, 64 rows 68.8 and 66.7, 128 rows 132.7 and 128.6,
# 256 rows 255.7 and 249.6 (Triton 3.6, 2026-11-29).
DEEP = DecodeTile(block_bytes=32 * 1024, warps=4, stages=4, early=2)
SHALLOW = DecodeTile(block_bytes=32 * 1024, warps=4, stages=2, early=0)
DEEP_UP_TO = 3  # programs a multiprocessor


def decode_tile(*, batch: int, kv_heads: int, multiprocessors: int) -> DecodeTile:
    """The tile for a batch: a pure function of host numbers."""
    few = batch * kv_heads <= DEEP_UP_TO * multiprocessors
    return DEEP if few else SHALLOW


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
    share: Tensor | None = None,
    tile: DecodeTile | None = None,
    pdl: bool = False,
    tables_ready: bool = False,
) -> Tensor:
    """`attention_twins.paged_decode`, with the kernel's own arguments.

    Args:
        max_seq_len: host bound on `seq_lens` for the choice of splits; results do not depend on it.
        splits: programs per row and KV head; `decode_splits` chooses if absent. A constant makes a
            row's result the same bits in every batch.
        scratch: where splits meet; allocated if absent and needed.
        share: [1] int32, keys that a program should have: a row is cut into as many runs as its own
            length asks for, at most `splits`, and a row of one run needs no second kernel's work.
        tile: what a program takes at once; `decode_tile` chooses if absent. A constant makes a
            row's result the same bits in every batch.
        pdl: programmatic dependent launch.
        tables_ready: with `pdl`, promises that `page_table` and `seq_lens` are complete before
            anything of this call can start: whatever wrote them and this call have a kernel between
            them that was launched without dependent launch, which is a barrier.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    layer = LayerDecode(
        q,
        k_cache,
        v_cache,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        pdl=pdl,
    )
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    layer(
        q,
        page_table,
        seq_lens,
        out=out,
        lse=lse,
        max_seq_len=max_seq_len,
        splits=splits,
        scratch=scratch,
        share=share,
        tile=tile,
        tables_ready=tables_ready,
    )
    return out


class LayerDecode:
    """`paged_decode` of one layer, step after step: what its steps share is worked out once.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_decode`.

    Raises:
        UnsupportedError: as `paged_decode`.
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
        self._heads, self._dim = q.shape[1:]
        self._caches, self._kv_heads, self._value_dim = (
            (k_cache, v_cache),
            k_cache.shape[2],
            v_cache.shape[3],
        )
        self._row_bytes = (padded(self._dim) + padded(self._value_dim)) * q.element_size()
        self._scale, self._window, self._soft_cap, self._sinks = scale, window, soft_cap, sinks
        self._pdl, self._multiprocessors = pdl, multiprocessors(q.device)
        self._launches: dict[tuple[DecodeTile, bool], tuple[KeptLaunches, KeptLaunches]] = {}

    def __call__(
        self,
        q: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        max_seq_len: int | None = None,
        splits: int | None = None,
        scratch: DecodeScratch | None = None,
        share: Tensor | None = None,
        tile: DecodeTile | None = None,
        tables_ready: bool = False,
    ) -> None:
        """Arguments: as of `paged_decode`; `out` is written."""
        batch, strides = q.shape[0], q.stride()
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        if batch == 0:
            return
        if splits is None:
            splits = self._splits(batch, max_seq_len or page_table.shape[1] * self._page)
        if tile is None:
            tile = decode_tile(
                batch=batch, kv_heads=self._kv_heads, multiprocessors=self._multiprocessors
            )
        if splits > 1:
            scratch = self._scratch(scratch, batch, splits, q.device)
        else:
            scratch = share = None
        parts = (None, None) if scratch is None else (scratch.values, scratch.lse)
        key = (strides, out.dtype, aligned(q, out, lse, *parts, share))
        launches = self._launches.get((tile, tables_ready))
        if launches is None:
            launches = self._launches[tile, tables_ready] = self._make_launches(tile, tables_ready)
        decode, combine = launches
        decode(
            key,
            (self._kv_heads, batch, splits),
            q,
            *self._caches,
            page_table,
            seq_lens,
            self._sinks,
            out,
            lse,
            *parts,
            share,
            self._scale,
            self._soft_cap,
            self._window,
            page_table.stride(0),
            *strides[:2],
        )
        if scratch is not None:
            combine(
                key,
                (batch, self._heads, 1),
                *parts,
                seq_lens,
                share,
                self._sinks,
                out,
                lse,
                splits,
                self._window,
            )

    @property
    def _page(self) -> int:
        return self._caches[0].shape[1]

    def _splits(self, batch: int, max_seq_len: int) -> int:
        return decode_splits(
            batch=batch,
            kv_heads=self._kv_heads,
            max_seq_len=max_seq_len,
            multiprocessors=self._multiprocessors,
            window=self._window,
        )

    def _scratch(
        self, given: DecodeScratch | None, batch: int, splits: int, device: torch.device
    ) -> DecodeScratch:
        sizes = {"batch": batch, "heads": self._heads, "splits": splits}
        if given is None:
            return DecodeScratch.allocate(**sizes, value_dim=self._value_dim, device=device)
        assert given.holds(**sizes, value_dim=self._value_dim)
        return given

    def _make_launches(
        self, tile: DecodeTile, tables_ready: bool
    ) -> tuple[KeptLaunches, KeptLaunches]:
        """Those of the kernel itself and of the one that combines splits."""
        group = self._heads // self._kv_heads
        block = block_keys(self._row_bytes, tile.block_bytes)
        values = {"VALUE_DIM": self._value_dim, "VALUE_PAD": padded(self._value_dim)}
        constants = {
            "GROUP": group,
            "GROUP_PAD": padded(group),
            "DIM": self._dim,
            "DIM_PAD": padded(self._dim),
            **values,
            "PAGE": self._page,
            "BLOCK": block,
            "K_STRIDES": self._caches[0].stride()[:3],
            "V_STRIDES": self._caches[1].stride()[:3],
            "EARLY": tile.early if self._pdl and tables_ready else 0,
        }
        promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
        options = launch_options(self._pdl)
        decode = KeptLaunches(
            _decode_kernel,
            constants | promises,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options,
        )
        combine = KeptLaunches(
            _combine_kernel,
            {"KEYS": block, "BLOCK": COMBINE_BLOCK, **values, **promises},
            num_warps=COMBINE_WARPS,
            **options,
        )
        return decode, combine


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
            early, spots = locate(table, block, block + within < stop, stop, PAGE, BLOCK)
            lines = early.to(tl.int64) * K_STRIDES[0] + spots * K_STRIDES[1]
            prefetch(keys + lines, DIM, max(DIM_PAD, 64))
            lines = early.to(tl.int64) * V_STRIDES[0] + spots * V_STRIDES[1]
            prefetch(vals + lines, VALUE_DIM, max(VALUE_PAD, 64))
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
        logits = base2_logits(query, k, scale, soft_cap)
        logits = tl.where(live[None, :], logits, float("-inf"))
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
def _combine_kernel(
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
