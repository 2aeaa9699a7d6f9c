"""Self-attention: projections, q/k norm, rope, KV write, backend."""

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
        self.operators = space.operators
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

    def unbind(self) -> None:
        """Forget pool and backend."""
        del self.pool, self.backend

    def attend(self, qkv: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """What lies between the projections: qkv [T, sum of sizes] -> [T, N * Dv]"""
        q, fresh = self.operators.rotate_and_write(self, qkv, rotation, batch)
        return self.backend.forward(q, self, batch, kv=fresh).flatten(1)
