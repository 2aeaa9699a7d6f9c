"""A tile of queries: their places, the keys that they see, their numbers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def places_of(queries, start, extend_start, sequence, followed, covered):
    """Places for a sequence's queries, whether they exist or not: more than there are queries where
    it is shorter on the device than the host believes, who knows how many tokens are `covered`.
    `followed`: by another sequence."""
    places = queries
    if covered is not None:
        end = covered
        if followed:
            end = tl.load(extend_start + sequence + 1)
        places = end - start
    return places


@triton.jit
def seen_keys(begins, last, queries, prefix, window, BLOCK: tl.constexpr):
    """Keys that some query of the tile from `begins` to `last` sees: first to stop. Keys that all
    of them see, in whole blocks: whole to partial; there nothing is masked."""
    first, stop = 0, tl.where(begins < queries, prefix + last, 0)
    whole = 0
    if window is not None:
        first = tl.maximum(prefix + begins - window + 1, 0)
        whole = tl.cdiv(tl.maximum(stop - window, 0), BLOCK) * BLOCK
    partial = tl.maximum(tl.minimum(prefix + begins + 1, stop) // BLOCK * BLOCK, whole)
    return first, stop, whole, partial


@triton.jit
def load_queries(
    q,
    token,
    head,
    exists,
    row_stride,
    head_stride,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """[M, DIM_PAD] of the tokens and heads [M]; those that do not exist, and padded columns, are
    0."""
    column = tl.arange(0, DIM_PAD)
    offsets = token[:, None] * row_stride + head[:, None] * head_stride + column[None, :]
    mask = exists[:, None] & (column < DIM)[None, :]
    return tl.load(q + offsets, mask=mask, other=0.0)
