"""Attention of one tile in torch whose queries have the same bits in any tile.

A query's products are made in blocks of `KEY_BLOCK` keys that begin at multiples of it, with a
number of queries beside it that is one of few proven ones; the blocks are added up in their order.
What a query does not see weighs exactly 0 and adds exactly nothing, so neither the length of a row
beside it nor blocks before and behind show. Float32 throughout.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels.row_blocks import equal_blocks

KEY_BLOCK = 64
DIM_STEP = 16  # of head dimensions, filled up with zeros: what libraries round to
QUERY_ROWS = (4, 8, 16, 32, 64, 128)  # queries times query heads of a KV head, filled up
BATCHES = (1, 2, 3, 8, 32)  # products side by side that are tried
SCORE_ELEMENTS = 1 << 23  # float32 scores held at a time
LOWEST = torch.finfo(torch.float32).min
SEED = 20261129


def proven_query_rows(dim: int, value_dim: int) -> tuple[int, ...]:
    """The sizes of `QUERY_ROWS` in which a query has the same bits, at every place and in any
    number of products side by side; with the threads of now. Empty when there are none."""
    draw = torch.Generator().manual_seed(SEED)
    heads, most = max(BATCHES), max(QUERY_ROWS)
    found = set(QUERY_ROWS)
    for inner, outer in ((_whole(dim), KEY_BLOCK), (KEY_BLOCK, _whole(value_dim))):
        left = torch.randn(heads, most, inner, generator=draw)
        right = torch.randn(heads, inner, outer, generator=draw)
        if outer == KEY_BLOCK:  # keys lie transposed
            right = right.transpose(1, 2).contiguous().transpose(1, 2)
        found &= set(_equal(left, right))
    return tuple(sorted(found))


def _equal(left: Tensor, right: Tensor) -> Iterator[int]:
    """Sizes whose products agree with those of the largest such size, whatever the batch."""
    alone = right[:1]
    sizes = equal_blocks(lambda x: torch.bmm(x[None], alone)[0], left[0], QUERY_ROWS)
    if not sizes:
        return
    expected = torch.cat(
        [
            torch.bmm(left[i : i + 1, : sizes[-1]].contiguous(), right[i : i + 1])
            for i in range(len(left))
        ]
    )
    for size in sizes:
        queries = left[:, :size].contiguous()
        parts = (torch.bmm(queries[:batch], right[:batch]) for batch in BATCHES)
        if all(torch.equal(part, expected[: len(part), :size]) for part in parts):
            yield size


def in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    query_rows: Sequence[int],
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of a tile.

    Args:
        q: [b, E, N, D]. k: [b, K, C, D]. v: [b, K, C, Dv]; C is a multiple of `KEY_BLOCK`.
        mask: [b, 1, E, C], 0 or -inf, added to the scores.
        query_rows: proven sizes, ascending; the largest is at least E * N / K.
        sinks: [N].

    Returns: [b, E, N, Dv] in q's dtype and lse [b, E, N] float32, sinks included.
    """
    rows, queries, heads, _ = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[-1]
    q, k, v = (_filled(part) for part in (q, k, v))
    group = heads // kv_heads
    size = next(size for size in query_rows if size >= queries * group)
    folded = q.new_zeros(rows, kv_heads, size, q.shape[-1], dtype=torch.float32)
    shape = (rows, queries, kv_heads, group, q.shape[-1])
    folded[:, :, : queries * group].unflatten(2, (queries, group)).copy_(
        q.reshape(shape).transpose(1, 2)
    )
    sink = None
    if sinks is not None:  # [K, E * G padded]
        sink = sinks.float().view(kv_heads, 1, group).expand(-1, queries, -1).flatten(1)
        sink = functional.pad(sink, (0, size - queries * group))
    together = max(1, SCORE_ELEMENTS // (rows * size * k.shape[2]))
    parts = [
        _heads(
            folded[:, begin : begin + together],
            k[:, begin : begin + together],
            v[:, begin : begin + together],
            mask,
            scale,
            (queries, group),
            soft_cap,
            None if sink is None else sink[begin : begin + together],
        )
        for begin in range(0, kv_heads, together)
    ]
    values, lse = parts[0]
    if len(parts) > 1:
        values, lse = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    values, lse = values[:, :, : queries * group, :value_dim], lse[:, :, : queries * group]
    values = values.unflatten(2, (queries, group)).transpose(1, 2).flatten(2, 3)
    lse = lse.unflatten(2, (queries, group)).transpose(1, 2).flatten(2, 3)
    return values.to(q.dtype), lse


def _heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    real: tuple[int, int],
    soft_cap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[b, K, M, Dv] and lse [b, K, M] float32 of q [b, K, M, D] for some of the KV heads.

    `real`: E and G, of which the first E * G of the M rows are made; the others are padding.
    """
    rows, kv_heads, size, dim = q.shape
    blocks = k.shape[2] // KEY_BLOCK
    lead = (rows, kv_heads, blocks)
    wide_q = q[:, :, None].expand(*lead, size, dim).reshape(-1, size, dim)
    wide_k = k.reshape(-1, KEY_BLOCK, dim).float()
    scores = torch.bmm(wide_q, wide_k.transpose(1, 2)).mul_(scale).unflatten(0, lead)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        queries, group = real
        seen = scores[:, :, :, : queries * group].unflatten(3, real)  # [b, K, n, E, G, block]
        hidden = mask.unflatten(3, (blocks, KEY_BLOCK)).permute(
            0, 1, 3, 2, 4
        )  # [b, 1, n, E, block]
        seen += hidden[:, :, :, :, None]
    peak = scores.amax(dim=(2, 4)).clamp_(min=LOWEST)  # [b, K, M]
    if sink is not None:
        peak = torch.maximum(peak, sink)
    weights = scores.sub_(peak[:, :, None, :, None]).exp_()  # [b, K, n, M, block]
    total = _in_order(weights.sum(-1))  # [b, K, M]
    if sink is not None:
        total = total + torch.exp(sink - peak)
    values = torch.bmm(weights.flatten(0, 2), v.reshape(-1, KEY_BLOCK, v.shape[-1]).float())
    values = _in_order(values.unflatten(0, lead))  # [b, K, M, Dv]
    return values / total[..., None], peak + torch.log(total)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 2, one block after another; blocks of zeros change nothing."""
    total = parts[:, :, 0]
    for block in range(1, parts.shape[2]):
        total = total + parts[:, :, block]
    return total


def _filled(heads: Tensor) -> Tensor:
    """[..., D] with zeros up to a multiple of `DIM_STEP`."""
    missing = _whole(heads.shape[-1]) - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads


def _whole(dim: int) -> int:
    return -(-dim // DIM_STEP) * DIM_STEP
