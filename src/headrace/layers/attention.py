"""Self-attention: projections, q/k norm, rope, KV write, backend."""

import torch
from torch import Tensor, nn

from headrace.attention.backend import AttentionBackend
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import KvPool
from headrace.config.persona import ModelTraits
from headrace.layers.linear import Linear, MergedLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import Rotation
from headrace.layers.weights import WeightSpace


class SelfAttention(nn.Module):
    """One attention layer; it is the `AttentionLayer` that backends see.

    Assembly calls `bind` with the pool and the backend of the layer's KV group, again whenever
    one of them is made anew.
    """

    pool: KvPool
    backend: AttentionBackend
    sinks: Tensor | None

    def __init__(self, traits: ModelTraits, layer_id: int, *, space: WeightSpace) -> None:
        super().__init__()
        attention, layer = traits.attention, traits.layers[layer_id]
        self.layer_id, self.pool_layer = layer_id, -1
        self.kv_group, self.window, self.rope = layer.kv_group, layer.window, layer.rope
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim, self.v_head_dim = attention.head_dim, attention.v_head_dim
        self.scale, self.soft_cap = attention.scale, attention.soft_cap
        self.sinks = None
        self.rotating = (self.num_heads + self.num_kv_heads) * self.head_dim
        self.qkv_proj = MergedLinear(
            traits.hidden_size,
            {
                "q_proj": self.num_heads * self.head_dim,
                "k_proj": self.num_kv_heads * self.head_dim,
                "v_proj": self.num_kv_heads * self.v_head_dim,
            },
            bias=attention.qkv_bias,
            space=space,
        )
        self.o_proj = Linear(
            self.num_heads * self.v_head_dim,
            traits.hidden_size,
            bias=attention.output_bias,
            space=space,
        )
        self.q_norm = self.k_norm = None
        if attention.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(self.head_dim, eps=traits.norm_eps, offset=traits.norm_offset, space=space)
                for _ in range(2)
            )

    def bind(self, pool: KvPool, backend: AttentionBackend, pool_layer: int) -> None:
        """Give the layer its KV memory (`pool_layer` is its index there) and its backend."""
        self.pool, self.backend, self.pool_layer = pool, backend, pool_layer

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """[T, H] -> [T, H]"""
        tokens, heads = hidden.shape[0], (self.num_heads, self.num_kv_heads)
        qkv = self.qkv_proj(hidden)
        # q and k lie side by side, so one rotation turns both
        qk = qkv[:, : self.rotating].view(tokens, sum(heads), self.head_dim)  # [T, N + K, D]
        v = qkv[:, self.rotating :].view(tokens, self.num_kv_heads, self.v_head_dim)  # [T, K, Dv]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split(heads, dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotation.apply(qk).split(heads, dim=1)  # [T, N, D], [T, K, D]
        self.pool.write(self.pool_layer, batch.kv[self.kv_group].out_cache_loc, k, v)
        fresh = batch.mode.is_extend and not batch.facts.has_prefix
        out = self.backend.forward(q, self, batch, kv=(k, v) if fresh else None)  # [T, N, Dv]
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]
