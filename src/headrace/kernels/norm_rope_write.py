"""From the QKV product to attention, in plain torch: the meaning of the Triton kernel.

Norm of each head of q and k, half-split rotation (Su et al., 2021: dimension i turns with
i + R/2), keys and values to their slots of the paged pool. Float32 from the product to the one
rounding at the end; the layers round the norm too, so they differ by that rounding of q's dtype.
"""

import torch
from torch import Tensor

from headrace.kernels.gated_activation import summed, widened
from headrace.kernels.norms import rms_norm


def norm_rope_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Writes k and v to the pool and returns the queries.

    Args:
        qkv: [T, N D + K D + K Dv]; rows may be strided. Or parts of it, [S, T, ...] float32, of
            `few_rows`.
        cos_sin: [L, R] float32, R <= D even: cosines, then sines, R/2 each; the dimensions of a
            head from R on are not turned.
        positions: [T] int64, below L.
        k_cache: [P, page, K, D]; v_cache: [P, page, K, Dv]. Their dtype may differ from q's.
        slots: [T] int64 into [P * page]. Live slots differ; slot 0 is padding and takes any number
            of tokens.
        q_norm, k_norm: [D], of q's dtype or float32; both or neither.
        eps: of the norms.
        out: [T, N, D], written and returned; allocated if absent.
        dtype: of the queries, if `out` is absent: qkv's by default.

    Returns: queries [T, N, D].
    """
    dtype, qkv = dtype or qkv.dtype, summed(qkv)
    assert (q_norm is None) == (k_norm is None)
    kv_heads, dim, value_dim = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
    key_size, value_size = kv_heads * dim, kv_heads * value_dim
    sizes = (qkv.shape[1] - key_size - value_size, key_size, value_size)
    q, k, v = qkv.split(sizes, dim=1)
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)  # [T, 1, R / 2] each

    def turned(heads: Tensor, weight: Tensor | None) -> Tensor:
        wide = widened(heads.unflatten(1, (-1, dim)))
        if weight is not None:
            wide = rms_norm(wide, weight, eps=eps)
        half = cos.shape[-1]
        first, second, rest = wide.split((half, half, dim - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    k_cache.flatten(0, 1)[slots] = turned(k, k_norm).to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = v.unflatten(1, (kv_heads, value_dim)).to(v_cache.dtype)
    queries = turned(q, q_norm).to(dtype)
    return queries if out is None else out.copy_(queries)
