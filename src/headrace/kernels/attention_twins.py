"""Paged attention in plain torch: the meaning that every attention kernel is tested against.

Slot of key position `j` of a row: `page_table[row, j // page] * page + j % page`. A query at
position `i` sees keys `j <= i`, with a window also `j > i - window` (the query's own key counts, as
in transformers' `sliding_window`). Query head `n` reads KV head `n // (N // K)`.

Logits are `scale * q.k`, with a soft cap `cap * tanh(scale * q.k / cap)` (Gemma 2). A sink is one
more logit per head in the denominator, with no value, neither scaled nor capped (gpt-oss).

`lse` is the natural logarithm of the sum of exponentials, sink included: whoever merges two parts
gives the sinks to one of them only, the one that is never empty. Sums are float32, or float64 for
float64 inputs. Slots that no query sees are never read as numbers: NaN there changes nothing.
"""

import torch
from torch import Tensor


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
) -> Tensor:
    """Attention of one new token per row; its own key and value lie in the pool already.

    Args:
        q: [B, N, D].
        k_cache: [P, page, K, D].
        v_cache: [P, page, K, Dv]; Dv may differ from D.
        page_table: [B, max_pages] int32.
        seq_lens: [B] int32, keys of each row, the new token included. 0: the row's output is zero
            and its `lse` -inf.
        scale: factor on q.k.
        window: keys a query sees, itself included, or all of them.
        soft_cap: bound on the logits.
        sinks: [N] float32.
        out: [B, N, Dv], written and returned; allocated if absent.
        lse: [B, N] float32, written if given.
        max_seq_len: host bound on `seq_lens`; the table's capacity if absent.

    Returns: [B, N, Dv] in q's dtype.
    """
    capacity = page_table.shape[1] * k_cache.shape[1]
    keys = capacity if max_seq_len is None else min(capacity, max_seq_len)
    position = (seq_lens - 1)[:, None]  # [B, 1]
    values, sums = _attend(
        q[:, None],
        _gather(k_cache, page_table, keys),
        _gather(v_cache, page_table, keys),
        position,
        live=position >= 0,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    if lse is not None:
        lse.copy_(sums[:, 0])
    if out is None:
        return values[:, 0].to(q.dtype)
    return out.copy_(values[:, 0])


def paged_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    extend_start: Tensor,
    extend_lens: Tensor,
    prefix_lens: Tensor,
    *,
    max_extend: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens of each sequence over its pages.

    Query `i` of sequence `b` is row `extend_start[b] + i` of `q` and sits at position
    `prefix_lens[b] + i`. Rows of `q` that belong to no sequence are padding: with `out` (or `lse`)
    given, their entries are left as they were; a new output holds zeros there.

    Args:
        q: [T, N, D].
        k_cache: [P, page, K, D]; the new tokens' keys are in it already.
        v_cache: [P, page, K, Dv].
        page_table: [B, max_pages] int32.
        extend_start, extend_lens, prefix_lens: [B] int32; a length of 0 is a row without queries.
        max_extend: host bound on `extend_lens`.
        scale, window, soft_cap, sinks: as in `paged_decode`.
        out: [T, N, Dv], written and returned; allocated if absent.
        lse: [T, N] float32, written if given.

    Returns: [T, N, Dv] in q's dtype.
    """
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_zeros(tokens, heads, v_cache.shape[3])
    if tokens == 0 or max_extend == 0:
        return out
    step = torch.arange(max_extend, device=q.device)  # [E]
    position = prefix_lens[:, None] + step  # [B, E]
    values, sums = _attend(
        q[(extend_start[:, None] + step).clamp(max=tokens - 1)],  # [B, E, N, D]
        _gather(k_cache, page_table, page_table.shape[1] * k_cache.shape[1]),
        _gather(v_cache, page_table, page_table.shape[1] * k_cache.shape[1]),
        position,
        live=step < extend_lens[:, None],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    token = torch.arange(tokens, device=q.device)
    index = token - extend_start[:, None]  # [B, T]
    owns = (index >= 0) & (index < extend_lens[:, None])
    live, row = owns.any(dim=0), owns.int().argmax(dim=0)  # [T]
    place = (row, index[row, token].clamp(0, max_extend - 1))
    if lse is not None:
        lse.copy_(torch.where(live[:, None], sums[place].to(lse.dtype), lse))
    return out.copy_(torch.where(live[:, None, None], values[place].to(out.dtype), out))


def _gather(cache: Tensor, page_table: Tensor, keys: int) -> Tensor:
    """The first `keys` positions of every row: [B, keys, K, D]."""
    page = cache.shape[1]
    position = torch.arange(keys, device=cache.device)
    return cache[page_table[:, position // page].long(), position % page]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    *,
    live: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Values [B, E, N, Dv] and lse [B, E, N] of q [B, E, N, D] over k, v [B, C, K, D or Dv].

    `position` [B, E] places each query, `live` [B, E] says which of them exist.
    """
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    exact = torch.promote_types(q.dtype, torch.float32)
    key = torch.arange(keys, device=q.device)
    sees = live[:, :, None] & (key <= position[:, :, None])  # [B, E, C]
    if window is not None:
        sees &= key > position[:, :, None] - window
    seen = sees.any(dim=1)[:, :, None, None]
    k, v = (torch.where(seen, rows.to(exact), 0.0) for rows in (k, v))

    q = q.to(exact).reshape(batch, queries, kv_heads, group, dim)
    logits = torch.einsum("bekgd,bckd->bekgc", q, k) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~sees[:, :, None, None], float("-inf"))
    logits = logits.flatten(2, 3)  # [B, E, N, C]
    if sinks is not None:
        sink = sinks.to(exact).expand(batch, queries, heads)
        sink = sink.masked_fill(~live[:, :, None], float("-inf"))
        logits = torch.cat((logits, sink[..., None]), dim=3)
    lse = torch.logsumexp(logits, dim=3)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    weights = weights[..., :keys].reshape(batch, queries, kv_heads, group, keys)
    return torch.einsum("bekgc,bckd->bekgd", weights, v).flatten(2, 3), lse
