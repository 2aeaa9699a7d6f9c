"""What programs of `invariant_attention` compute: splits, running softmax, their sums, results.

Every multiplication that is followed by an addition is written as one fused operation: which ones a
compiler fuses may differ between variants of a kernel, and so would bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels import invariant_splits
from headrace.kernels.attention_math_triton import LN_2, base2_lse, divide, dot
from headrace.kernels.fused_math_triton import LOG2_E

FIRST_KEYS = tl.constexpr(invariant_splits.FIRST_KEYS)
SAME_LENGTH = tl.constexpr(invariant_splits.SAME_LENGTH)
LEVELS = tl.constexpr(12)  # lengths of splits that positions up to 8 million need


@triton.jit
def split_start(split, GROWS: tl.constexpr):
    """`invariant_splits.split_start`"""
    if GROWS:
        level, within = split // SAME_LENGTH, split % SAME_LENGTH
        start = FIRST_KEYS * (SAME_LENGTH * ((1 << level) - 1) + (within << level))
    else:
        start = split * FIRST_KEYS
    return start


@triton.jit
def split_of(position, GROWS: tl.constexpr):
    """`invariant_splits.split_of`"""
    if GROWS:
        units = position // (FIRST_KEYS * SAME_LENGTH) + 1
        level = 0
        for power in tl.static_range(1, LEVELS):
            level += (units >= 1 << power).to(tl.int32)
        start = FIRST_KEYS * SAME_LENGTH * ((1 << level) - 1)
        split = level * SAME_LENGTH + (position - start) // (FIRST_KEYS << level)
    else:
        split = position // FIRST_KEYS
    return split


@triton.jit
def empty(ROWS: tl.constexpr, VALUES: tl.constexpr):
    """What a row that saw no key has: largest logit, sum, values."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)


@triton.jit
def take_block(logits, factor, v, top, total, values):
    """One block of masked logits [M, BLOCK], times a factor above 0, and v [BLOCK, Dv] into the
    running softmax. A row that sees none of it keeps its bits."""
    new_top = tl.maximum(top, tl.max(logits, 1) * factor)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    factors = tl.full(logits.shape, factor, tl.float32)
    weights = tl.exp2(tl.fma(logits, factors, 0.0 - base[:, None]))
    shrink = tl.exp2(top - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    values = dot(weights.to(v.dtype), v, values * shrink[:, None])
    return new_top, total, values


@triton.jit
def take_split(top, total, values, split_top, split_total, split_values):
    """One more split into the sum of those before it. An empty one changes no bit, and into an
    empty sum it comes as it is."""
    new_top = tl.maximum(top, split_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, take = tl.exp2(top - base), tl.exp2(split_top - base)
    total = tl.fma(split_total, take, total * keep)
    values = tl.fma(split_values, take[:, None], values * keep[:, None])
    return new_top, total, values


@triton.jit
def finish(
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
def leave(
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
    """The sum of one split, for `combine_kernel`; entry: [M] of [B, N, S]."""
    column = tl.arange(0, VALUE_PAD)
    mask = exists[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(part_values + entry[:, None] * VALUE_DIM + column[None, :], values, mask=mask)
    tl.store(part_sums + entry, top, mask=exists)
    tl.store(part_sums + entries + entry, total, mask=exists)
