"""What the attention kernels share: paged loads, logits, the running softmax, argument checks.

The running softmax is that of FlashAttention (Dao et al., 2022), kept in base 2: `exp2` is the
hardware's own exponential.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.fused_math_triton import LOG2_E, check_fused

MAX_HEAD_DIM = 256
MAX_PAGE = 128

LN_2 = tl.constexpr(0.6931471805599453)
# The interpreter multiplies the raw bits of bfloat16 operands in `tl.dot` (seen in Triton 3.9).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, sums):
    """sums + a b in float32; float32 operands are not rounded to TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


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
def locate(table, block, live, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Pages, and places in them, of the positions `block` to `block + BLOCK`.

    `block` is a multiple of BLOCK and one of its positions is live; none from `stop` on is. Where a
    block lies in one page, or in a few, there is one look-up per page and not per key.
    """
    within = tl.arange(0, BLOCK)
    places = (block + within) % PAGE
    if PAGE >= BLOCK:
        pages = tl.load(table + block // PAGE)
        places = block % PAGE + within
    elif 4 * PAGE >= BLOCK:
        pages = tl.zeros([BLOCK], tl.int32)
        for part in tl.static_range(BLOCK // PAGE):
            there = block + part * PAGE < stop
            page = tl.load(table + block // PAGE + part, mask=there, other=0)
            pages = tl.where(within // PAGE == part, page, pages)
    else:
        pages = tl.load(table + (block + within) // PAGE, mask=live, other=0)
    return pages, places


@triton.jit
def load_rows(
    cache,
    pages,
    places,
    live,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """[BLOCK, DIM_PAD] rows of one KV head; rows not live and padded columns are 0."""
    column = tl.arange(0, DIM_PAD)
    offsets = pages.to(tl.int64) * PAGE_STRIDE + places * SLOT_STRIDE
    mask = live[:, None] & (column < DIM)[None, :]
    return tl.load(cache + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def softmax_step(logits, v, top, total, values):
    """Takes one block of masked base-2 logits [M, BLOCK] and v [BLOCK, Dv] into the running sums.

    A row that has seen no key yet keeps top = -inf, total = 0, values = 0.
    """
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    values = dot(weights.to(v.dtype), v, values * shrink[:, None])
    return new_top, total, values


@triton.jit
def add_sink(sink, top, total, values):
    """One more logit in the denominator of rows that saw a key; sink: [M] natural units."""
    sink = tl.where(total > 0.0, sink * LOG2_E, float("-inf"))
    new_top = tl.maximum(top, sink)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    return new_top, total * shrink + tl.exp2(sink - base), values * shrink[:, None]


@triton.jit
def divide(values, total):
    """values / total; rows that saw nothing are 0."""
    return values / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def base2_lse(top, total):
    """log2 of the sum of exponentials; -inf for a row that saw nothing."""
    return top + tl.log2(tl.where(total > 0.0, total, 1.0))


def padded(size: int) -> int:
    """The next power of two that a `tl.dot` takes: at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def block_keys(row_bytes: int, block_bytes: int) -> int:
    """Keys of a block whose K and V rows (`row_bytes` together) fill at most `block_bytes`."""
    fitting = max(1, block_bytes // row_bytes)
    return max(16, min(128, 1 << (fitting.bit_length() - 1)))


def check_layer(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, pdl: bool) -> None:
    """Refuses what the kernels do not take; wrong shapes are our own bugs and only asserted.

    Raises:
        UnsupportedError: device without a way to run Triton, dtype, head size or page size, or
            `pdl` before Hopper.
    """
    check_fused("Attention", q, pdl=pdl)
    page, kv_heads = k_cache.shape[1:3]
    if max(q.shape[2], v_cache.shape[3]) > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"Triton attention got head sizes {q.shape[2]} and {v_cache.shape[3]}",
            why=f"its blocks hold at most {MAX_HEAD_DIM}",
            remedy="use the torch_native backend",
        )
    if page & (page - 1) or page > MAX_PAGE:
        raise UnsupportedError(
            f"Triton attention got page size {page}", why=f"it takes powers of two to {MAX_PAGE}"
        )
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.shape[3] == q.shape[2]
    assert v_cache.shape[:3] == k_cache.shape[:3]
    assert q.shape[1] % kv_heads == 0
    assert all(tensor.stride(-1) == 1 for tensor in (k_cache, v_cache))
