"""Attention of one tile in torch: torch's fused kernel, and explicit float32 for the rest."""

import torch
from torch import Tensor
from torch.nn import functional

SCORE_ELEMENTS = 1 << 24  # float32 scores held at a time


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`scaled_dot_product_attention` of a tile, softmax in float32.

    Args:
        q: [b, E, N, D]. k: [b, C, K, D]. v: [b, C, K, Dv].
        mask: [b, 1, E, C], added to the scores.

    Returns: [b, E, N, Dv]; undefined for a query that sees nothing.
    """
    rows, queries, heads, _ = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [b, K, C, D], [b, K, C, Dv]
    if queries == 1:
        # The heads of a group become the queries of their KV head: one read of K and V.
        q = q.reshape(rows, k.shape[1], -1, q.shape[3])  # [b, K, G, D]
        values = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return values.reshape(rows, 1, heads, -1)
    values = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=heads > k.shape[1]
    )
    return values.transpose(1, 2)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `fused`, with soft cap and sinks, and the lse [b, E, N] float32 (sinks included)."""
    kv_heads = k.shape[2]
    rows, queries, heads, _ = q.shape
    group = heads // kv_heads
    q = q.reshape(rows, queries, kv_heads, group, -1)  # [b, E, K, G, D]
    sink = None if sinks is None else sinks.float().view(kv_heads, group)
    elements = rows * queries * group * k.shape[1]
    together = max(1, SCORE_ELEMENTS // elements)
    parts = [
        _explicit_heads(
            q[:, :, begin : begin + together],
            k[:, :, begin : begin + together],
            v[:, :, begin : begin + together],
            mask,
            scale,
            soft_cap,
            None if sink is None else sink[begin : begin + together],
        )
        for begin in range(0, kv_heads, together)
    ]
    values = torch.cat([part[0] for part in parts], dim=1)  # [b, K, G, E, Dv]
    lse = torch.cat([part[1] for part in parts], dim=1)  # [b, K, G, E]
    return values.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2).transpose(1, 2)


def _explicit_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[b, K, G, E, Dv] in q's dtype and lse [b, K, G, E] for some of the KV heads."""
    queries, group = q.shape[1], q.shape[3]
    folded = q.float().permute(0, 2, 3, 1, 4).flatten(2, 3)  # [b, K, G * E, D]
    scores = (folded @ k.float().permute(0, 2, 3, 1)).mul_(scale)  # [b, K, G * E, C]
    scores = torch.unflatten(scores, 2, (group, queries))
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask[:, :, None]
    lse = torch.logsumexp(scores, dim=-1)  # [b, K, G, E]
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, :, None])
    weights = scores.sub_(lse[..., None]).exp_().flatten(2, 3)
    values = weights @ v.float().transpose(1, 2)  # [b, K, G * E, Dv]
    return torch.unflatten(values, 2, (group, queries)).to(q.dtype), lse
