"""What attention backends may expect of a KV pool and of an attention layer."""

from typing import Protocol

from torch import Tensor


class KvPool(Protocol):
    """KV memory of one group of layers; layers count from 0 within the pool."""

    page_size: int

    def key_value(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [P, page, K, D] and values [P, page, K, Dv] of a layer."""

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [T, K, D] and value [T, K, Dv] of a layer at slots [T] int64."""


class AttentionLayer(Protocol):
    """The shape and the habits of one attention layer, as backends see it.

    `pool_layer` is its index in its pool; `window` counts the keys a query sees, itself included.
    """

    layer_id: int
    pool_layer: int
    kv_group: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    pool: KvPool
