"""The KV canary in two Triton launches a step and KV group. Meaning: `kv_canary`.

A program takes every so many blocks of positions of one sequence, found by its length on the
device, so a launch inside a graph fits whatever the rows hold by then. Each program of a sequence
walks over the hashes of all of its new tokens, which costs little, and stores those of its own
blocks: nobody waits for anybody.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels import kv_canary
from headrace.kernels.fused_math_triton import next_power
from headrace.kernels.kv_canary import CanaryRecords, CanaryReport, CanaryStep
from headrace.kernels.kv_canary_math_triton import (
    POSITION,
    add_words,
    append,
    mix64,
    records_found,
    slots_of,
)
from headrace.kernels.support_triton import triton_available

_BLOCK = 64  # positions
_TILE = 32  # words of a slot at once
_PROGRAMS = 2048  # of a launch, about: some for every multiprocessor, however few rows there are

_TOKEN = tl.constexpr(kv_canary.TOKEN)
_DATA = tl.constexpr(kv_canary.DATA)
_BEFORE = tl.constexpr(kv_canary.BEFORE)
_HEAD = tl.constexpr(kv_canary.HEAD)
_LOW_WORD = tl.constexpr(kv_canary.LOW_WORD)

_UNALIGNED = [
    *("seq_lens", "firsts", "extend_lens", "extend_start", "input_ids", "positions"),
    *("out_cache_loc", "page_table", "ends", "inputs"),
]


def begin_step(
    step: CanaryStep, records: CanaryRecords, report: CanaryReport, *, group: int = 0
) -> None:
    """`kv_canary.begin_step`.

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(step.seq_lens)
    sequences = step.seq_lens.shape[0]
    if sequences > 0:
        _before_kernel[(sequences, _parts(step))](
            step.seq_lens,
            step.firsts,
            step.extend_lens,
            step.extend_start,
            step.input_ids,
            step.positions,
            step.out_cache_loc,
            step.page_table,
            step.page_table.stride(0),
            records.marks,
            records.chains,
            report.ring,
            report.count,
            CAPACITY=report.ring.shape[0],
            GROUP=group,
            PAGE=step.page_size,
            BLOCK=_BLOCK,
            num_warps=2,
        )


def end_step(
    step: CanaryStep,
    records: CanaryRecords,
    report: CanaryReport,
    *,
    group: int = 0,
    stage: int = kv_canary.AFTER,
) -> None:
    """`kv_canary.end_step`.

    Raises:
        UnsupportedError: a device without a way to run Triton.
    """
    _check(step.seq_lens)
    sequences = step.seq_lens.shape[0]
    if sequences == 0:
        return
    sizes = [_words(records, each) for each in (records.keys, records.values)]
    tile = min(_TILE, next_power(max(sizes)))
    _after_kernel[(sequences, _parts(step))](
        step.seq_lens,
        step.firsts,
        step.extend_lens,
        step.extend_start,
        step.input_ids,
        step.positions,
        step.page_table,
        step.page_table.stride(0),
        records.marks,
        records.chains,
        records.prints,
        records.keys,
        records.values,
        records.layers,
        records.keys.shape[1],
        report.ring,
        report.count,
        report.ends,
        report.inputs,
        report.inputs.stride(0),
        stage,
        CAPACITY=report.ring.shape[0],
        GROUP=group,
        PAGE=step.page_size,
        LAYERS=records.layers.shape[0],
        KEY_WORDS=records.keys.shape[2],
        KEY_READ=sizes[0],
        VALUE_WORDS=records.values.shape[2],
        VALUE_READ=sizes[1],
        LAYER_TILE=min(_TILE // tile, next_power(records.layers.shape[0])),
        WORD_TILE=tile,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _words(records: CanaryRecords, words: Tensor) -> int:
    assert words.stride(1) == words.shape[2]
    assert words.stride(2) == 1
    return min(records.words, words.shape[2]) if records.words else words.shape[2]


def _parts(step: CanaryStep) -> int:
    """Programs of a sequence; no more than its longest has blocks."""
    assert step.page_table.stride(1) == 1
    blocks = -(-step.page_table.shape[1] * step.page_size // _BLOCK)
    return max(1, min(-(-_PROGRAMS // step.seq_lens.shape[0]), blocks))


def _check(lengths: Tensor) -> None:
    if refusal := triton_available(lengths.device.type):
        raise UnsupportedError(
            f"The KV canary by Triton cannot run on {lengths.device.type}",
            why=refusal.reason,
            remedy=refusal.remedy,
        )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def _before_kernel(
    seq_lens,
    firsts,
    extend_lens,
    extend_start,
    input_ids,
    positions,
    out_cache_loc,
    page_table,
    table_stride,
    marks,
    chains,
    ring,
    count,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: every so many blocks of positions of one sequence."""
    place, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    total, first = tl.load(seq_lens + place), tl.load(firsts + place)
    new, start = 1, place
    if extend_lens is not None:
        new, start = tl.load(extend_lens + place), tl.load(extend_start + place)
    prefix = tl.maximum(total - new, 0)
    skipped = tl.maximum(first // PAGE - 1, 0)
    table = page_table + place.to(tl.int64) * table_stride
    lane = tl.arange(0, BLOCK)
    for block in range(first + part * BLOCK, prefix, parts * BLOCK):
        position = block + lane
        kinds, expected, found, slot, _ = records_found(
            table, position, skipped, position < prefix, marks, chains, _HEAD, PAGE
        )
        append(
            ring,
            count,
            kinds,
            _BEFORE,
            place,
            position,
            slot,
            expected,
            found,
            CAPACITY,
            GROUP,
            BLOCK,
        )
    last = tl.maximum(prefix - 1, 0)
    has_history = (prefix > 0) & (total > 0)
    end = slots_of(table, last, skipped, has_history, PAGE)
    running = tl.load(chains + end, mask=has_history, other=_HEAD)
    for block in range(prefix, total, BLOCK):
        position = block + lane
        there = position < total
        token = start + position - prefix
        ids = tl.load(input_ids + token, mask=there, other=0) & _LOW_WORD
        mark = (position.to(tl.int64) << 32) | ids
        hashes = tl.where(there, mix64(mark), 0)
        if ((block - prefix) // BLOCK) % parts == part:
            slot = tl.load(out_cache_loc + token, mask=there, other=0)
            tl.store(marks + slot, mark, mask=there)
            tl.store(chains + slot, running + tl.cumsum(hashes, 0), mask=there)
            fed = tl.load(positions + token, mask=there, other=0)
            kinds = (there & (fed != position)).to(tl.int32) * POSITION
            expected = position.to(tl.int64)
            append(
                ring,
                count,
                kinds,
                _BEFORE,
                place,
                position,
                slot,
                expected,
                fed,
                CAPACITY,
                GROUP,
                BLOCK,
            )
        running += tl.sum(hashes, 0)


@triton.jit(
    do_not_specialize=["table_stride", "slots", "inputs_stride", "stage"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def _after_kernel(
    seq_lens,
    firsts,
    extend_lens,
    extend_start,
    input_ids,
    positions,
    page_table,
    table_stride,
    marks,
    chains,
    prints,
    keys,
    values,
    layers,
    slots,
    ring,
    count,
    ends,
    inputs,
    inputs_stride,
    stage,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    LAYERS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KEY_READ: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_READ: tl.constexpr,
    LAYER_TILE: tl.constexpr,
    WORD_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: every so many blocks of positions of one sequence."""
    place, part = tl.program_id(0), tl.program_id(1)
    total, first = tl.load(seq_lens + place), tl.load(firsts + place)
    new, start = 1, place
    if extend_lens is not None:
        new, start = tl.load(extend_lens + place), tl.load(extend_start + place)
    prefix = tl.maximum(total - new, 0)
    skipped = tl.maximum(first // PAGE - 1, 0)
    table = page_table + place.to(tl.int64) * table_stride
    lane = tl.arange(0, BLOCK)
    if (part == 0) & (total == 0):
        tl.store(ends + place, tl.zeros([], tl.int64))
    for block in range(first + part * BLOCK, total, tl.num_programs(1) * BLOCK):
        position = block + lane
        there = position < total
        fresh = there & (position >= prefix)
        kinds, expected, found, slot, mark = records_found(
            table, position, skipped, there, marks, chains, _HEAD, PAGE
        )
        token = start + position - prefix
        ids = tl.load(input_ids + token, mask=fresh, other=0) & _LOW_WORD
        other = fresh & (ids != (mark & _LOW_WORD))
        expected = tl.where(other & (kinds == 0), ids, expected)
        found = tl.where(other & (kinds == 0), mark & _LOW_WORD, found)
        kinds += other.to(tl.int32) * _TOKEN
        fed = tl.load(positions + token, mask=fresh, other=0)
        tl.store(inputs + token, ids.to(tl.int32), mask=fresh)
        tl.store(inputs + inputs_stride + token, fed.to(tl.int32), mask=fresh)
        if prints is not None:
            sums = tl.zeros([BLOCK, LAYER_TILE, WORD_TILE], tl.int64)
            sums = add_words(
                sums,
                keys,
                slot,
                there,
                layers,
                slots,
                0,
                LAYERS,
                KEY_WORDS,
                KEY_READ,
                LAYER_TILE,
                WORD_TILE,
            )
            sums = add_words(
                sums,
                values,
                slot,
                there,
                layers,
                slots,
                1,
                LAYERS,
                VALUE_WORDS,
                VALUE_READ,
                LAYER_TILE,
                WORD_TILE,
            )
            print_now = tl.sum(tl.sum(sums, 2), 1)
            history = there & (position < prefix)
            stored = tl.load(prints + slot, mask=history, other=0)
            changed = history & (stored != print_now)
            expected = tl.where(changed & (kinds == 0), stored, expected)
            found = tl.where(changed & (kinds == 0), print_now, found)
            kinds += changed.to(tl.int32) * _DATA
            tl.store(prints + slot, print_now, mask=fresh)
        at_end = there & (position == total - 1)
        chain = tl.load(chains + slot, mask=at_end, other=0)
        tl.store(ends + place + lane * 0, chain, mask=at_end)
        append(
            ring,
            count,
            kinds,
            stage,
            place,
            position,
            slot,
            expected,
            found,
            CAPACITY,
            GROUP,
            BLOCK,
        )
