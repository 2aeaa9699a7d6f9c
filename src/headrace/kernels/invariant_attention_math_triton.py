"""What programs of `invariant_attention` compute: splits, the running softmax, sums of splits.

Every multiplication that is followed by an addition is written as one fused operation: which ones a
compiler fuses may differ between variants of a kernel, and so would bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headrace.kernels import invariant_splits
from headrace.kernels.attention_math_triton import LOG2_E, dot

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
def logits_and_factor(q, k, scale, soft_cap):
    """Logits [M, BLOCK] and the factor that brings them to base 2."""
    logits = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    factor = scale * LOG2_E
    if soft_cap is not None:
        # tanh by one exponential: exact to a few 1e-7, and right at both infinities.
        logits = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E * scale / soft_cap)) + 1.0)
        factor = soft_cap * LOG2_E
    return logits, factor


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
