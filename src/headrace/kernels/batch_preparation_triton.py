"""From rows to the inputs of a step, and from its tokens back to the rows, in Triton.

Meaning: `batch_preparation` (`gather_decode`, `gather_extend`, `write_slots`,
`advance_length`, `advance_token`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.fused_math_triton import (
    begin,
    launch_options,
    next_power,
    wait,
)
from headrace.kernels.support_triton import triton_available

_PAGES = 256  # pages a program copies at once
_TOKENS = 256  # and tokens of a prompt
_MOST_PROGRAMS = 8  # per row


def prepare_decode(
    rows: Tensor,
    *,
    last_token: Tensor,
    length: Tensor,
    active: Tensor,
    tables: Mapping[str, Tensor],
    page_size: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    page_tables: Mapping[str, Tensor],
    out_cache_locs: Mapping[str, Tensor],
    pdl: bool = False,
) -> None:
    """Inputs of a decode step of B rows into buffers of the caller: one launch per KV group.

    A row that is not active gets length 0 and slot 0. Of a page table only the pages up to the
    row's length are written; what lies behind them stays and must not be read.

    Args:
        rows: [B] int64.
        last_token, length, active: columns [R] int64, int32, bool.
        tables: group -> [R, pages] int32.
        input_ids, positions: [B] int64, written; seq_lens: [B] int32, written (after the step).
        page_tables: group -> [B, at least as many pages as rows can have] int32, written.
        out_cache_locs: group -> [B] int64, written.
        pdl: programmatic dependent launch (compute capability 9.0 or newer).

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(rows)
    assert tables
    assert tables.keys() == page_tables.keys() == out_cache_locs.keys()
    batch = rows.shape[0]
    if batch == 0:
        return
    for name, table in tables.items():
        gathered = page_tables[name]
        assert gathered.stride(1) == table.stride(1) == 1
        programs = min(triton.cdiv(gathered.shape[1], _PAGES), _MOST_PROGRAMS)
        _prepare_kernel[(batch, programs)](
            rows,
            last_token,
            length,
            active,
            table,
            input_ids,
            positions,
            seq_lens,
            gathered,
            out_cache_locs[name],
            TABLE_STRIDE=table.stride(0),
            GATHERED_STRIDE=gathered.stride(0),
            GATHERED_PAGES=gathered.shape[1],
            PAGE=page_size,
            BLOCK=_PAGES,
            PDL=pdl,
            num_warps=2,
            **launch_options(pdl),
        )


def prepare_extend(
    rows: Tensor,
    new_tokens: Tensor,
    start: Tensor,
    prompt_tokens: Tensor,
    *,
    last_token: Tensor,
    length: Tensor,
    active: Tensor,
    tables: Mapping[str, Tensor],
    page_size: int,
    max_new: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    prefix_lens: Tensor,
    out_cache_locs: Mapping[str, Tensor],
    pdl: bool = False,
) -> None:
    """Inputs of a step whose B sequences bring T tokens in all: one launch per KV group.

    Args:
        rows: [B] int64; new_tokens, start: [B] int32, tokens of each sequence and of those before.
        prompt_tokens: [T] int64, -1 where the row's last token stands.
        last_token, length, active: columns [R] int64, int32, bool.
        tables: group -> [R, pages] int32.
        max_new: the largest of `new_tokens`, on the host.
        input_ids, positions: [T] int64, written.
        seq_lens, extend_lens, prefix_lens: [B] int32, written; 0 for a row that is not active.
        out_cache_locs: group -> [T] int64, written; 0 for tokens of rows that are not active.
        pdl: programmatic dependent launch (compute capability 9.0 or newer).

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(rows)
    if rows.shape[0] == 0:
        return
    for name, table in tables.items():
        assert table.stride(1) == 1
        programs = max(1, min(triton.cdiv(max_new, _TOKENS), _MOST_PROGRAMS))
        _prepare_extend_kernel[(rows.shape[0], programs)](
            rows,
            new_tokens,
            start,
            prompt_tokens,
            last_token,
            length,
            active,
            table,
            input_ids,
            positions,
            seq_lens,
            extend_lens,
            prefix_lens,
            out_cache_locs[name],
            TABLE_STRIDE=table.stride(0),
            PAGE=page_size,
            BLOCK=_TOKENS,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )


def advance_decode(
    rows: Tensor,
    tokens: Tensor,
    finite: Tensor,
    *,
    length: Tensor | None,
    last_token: Tensor,
    active: Tensor,
    stop_ids: Tensor,
    penalised: Tensor,
    token_counts: Tensor,
    pdl: bool = False,
) -> None:
    """End of a decode step: length + 1, last token, counts of penalised rows, endings; one launch.

    Rows that are not active keep everything, so row 0 may occur any number of times.

    Args:
        rows: [B] int64; tokens: [B] int64; finite: [B] bool.
        length, last_token, active, penalised: columns [R] int32, int64, bool, bool; no `length`
            where it has advanced already (`advance_lengths`).
        stop_ids: column [R, n] int64 padded with -1; token_counts: column [R, V] int32.
        pdl: programmatic dependent launch (compute capability 9.0 or newer).

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(rows)
    batch = rows.shape[0]
    if batch == 0:
        return
    _advance_kernel[(batch,)](
        rows,
        tokens,
        finite,
        length,
        last_token,
        active,
        stop_ids,
        penalised,
        token_counts,
        VOCABULARY=token_counts.shape[1],
        STOP_IDS=stop_ids.shape[1],
        STOP_IDS_PAD=next_power(stop_ids.shape[1]),
        PDL=pdl,
        num_warps=1,
        **launch_options(pdl),
    )


def advance_lengths(
    rows: Tensor,
    new_tokens: Tensor | None,
    *,
    length: Tensor,
    active: Tensor,
    pdl: bool = False,
) -> None:
    """length += new tokens of the rows that are active; one launch.

    Args:
        rows: [B] int64; new_tokens: [B] int32, `None` for one each.
        length, active: columns [R] int32, bool.
        pdl: programmatic dependent launch (compute capability 9.0 or newer).

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(rows)
    if rows.shape[0] > 0:
        _lengths_kernel[(rows.shape[0],)](
            rows, new_tokens, length, active, PDL=pdl, num_warps=1, **launch_options(pdl)
        )


def _check(rows: Tensor) -> None:
    if refusal := triton_available(rows.device.type):
        raise UnsupportedError(
            f"batch preparation by Triton cannot run on {rows.device.type}",
            why=refusal.reason,
            remedy=refusal.remedy,
        )


@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "input_ids", "positions", "seq_lens", "gathered", "out_cache_loc")
    ]
)
def _prepare_kernel(
    rows,
    last_token,
    length,
    active,
    table,
    input_ids,
    positions,
    seq_lens,
    gathered,
    out_cache_loc,
    TABLE_STRIDE: tl.constexpr,
    GATHERED_STRIDE: tl.constexpr,
    GATHERED_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: every so many blocks of pages of one row; the first also the row's numbers."""
    begin(PDL)
    wait(PDL)
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    live = tl.load(active + row)
    before = tl.load(length + row)
    total = tl.where(live, before + 1, 0)
    source = table + row * TABLE_STRIDE
    if part == 0:
        slot = tl.zeros([], tl.int64)
        if live:
            slot = tl.load(source + before // PAGE).to(tl.int64) * PAGE + before % PAGE
        tl.store(input_ids + place, tl.load(last_token + row))
        tl.store(positions + place, before.to(tl.int64))
        tl.store(seq_lens + place, total)
        tl.store(out_cache_loc + place, slot)
    pages = tl.minimum(tl.cdiv(total, PAGE), GATHERED_PAGES)
    for block in range(part * BLOCK, pages, tl.num_programs(1) * BLOCK):
        column = block + tl.arange(0, BLOCK)
        values = tl.load(source + column, mask=column < pages, other=0)
        tl.store(gathered + place * GATHERED_STRIDE + column, values, mask=column < pages)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "new_tokens", "start", "prompt_tokens", "input_ids", "positions", "seq_lens"),
        *("extend_lens", "prefix_lens", "out_cache_loc"),
    ]
)
def _prepare_extend_kernel(
    rows,
    new_tokens,
    start,
    prompt_tokens,
    last_token,
    length,
    active,
    table,
    input_ids,
    positions,
    seq_lens,
    extend_lens,
    prefix_lens,
    out_cache_loc,
    TABLE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: every so many blocks of tokens of one row; the first also the row's lengths."""
    begin(PDL)
    wait(PDL)
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    live = tl.load(active + row)
    before, new = tl.load(length + row), tl.load(new_tokens + place)
    first, last = tl.load(start + place), tl.load(last_token + row)
    written = tl.where(live, new, 0)  # tokens that get a slot
    if part == 0:
        tl.store(seq_lens + place, tl.where(live, before + new, 0))
        tl.store(extend_lens + place, written)
        tl.store(prefix_lens + place, tl.where(live, before, 0))
    for block in range(part * BLOCK, new, tl.num_programs(1) * BLOCK):
        offset = block + tl.arange(0, BLOCK)
        there = offset < new
        token, position = first + offset, before + offset
        prompt = tl.load(prompt_tokens + token, mask=there, other=0)
        tl.store(input_ids + token, tl.where(prompt < 0, last, prompt), mask=there)
        tl.store(positions + token, position.to(tl.int64), mask=there)
        pages = table + row * TABLE_STRIDE + position // PAGE
        page = tl.load(pages, mask=offset < written, other=0).to(tl.int64)
        slot = tl.where(live, page * PAGE + position % PAGE, 0)
        tl.store(out_cache_loc + token, slot, mask=there)


@triton.jit(do_not_specialize_on_alignment=["rows", "tokens", "finite"])
def _advance_kernel(
    rows,
    tokens,
    finite,
    length,
    last_token,
    active,
    stop_ids,
    penalised,
    token_counts,
    VOCABULARY: tl.constexpr,
    STOP_IDS: tl.constexpr,
    STOP_IDS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    begin(PDL)
    wait(PDL)
    place = tl.program_id(0)
    row = tl.load(rows + place)
    if tl.load(active + row):
        token = tl.load(tokens + place)
        column = tl.arange(0, STOP_IDS_PAD)
        stops = tl.load(stop_ids + row * STOP_IDS + column, mask=column < STOP_IDS, other=-1)
        stopped = tl.max((stops == token).to(tl.int32), 0) > 0
        if tl.load(penalised + row):
            count = token_counts + row * VOCABULARY + token
            tl.store(count, tl.load(count) + 1)
        if length is not None:
            tl.store(length + row, tl.load(length + row) + 1)
        tl.store(last_token + row, token)
        tl.store(active + row, (tl.load(finite + place) != 0) & (stopped == 0))


@triton.jit(do_not_specialize_on_alignment=["rows", "new_tokens"])
def _lengths_kernel(rows, new_tokens, length, active, PDL: tl.constexpr):
    """One program: one row."""
    begin(PDL)
    wait(PDL)
    place = tl.program_id(0)
    row = tl.load(rows + place)
    new = 1
    if new_tokens is not None:
        new = tl.load(new_tokens + place)
    if tl.load(active + row):
        tl.store(length + row, tl.load(length + row) + new)
