"""The keys and values of multi-head (and grouped-query) attention, in pages."""

import torch
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.memory.arena import Arena

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MHATokenToKVPool:
    """K and V of the layers of one KvGroup, [num_pages, page_size, heads, dim] for each layer.

    A layer is named by its index within the pool, so the layers of a group need not follow each
    other in the model. Page 0 is the padding page: padding writes into it, no live row reads it.
    The addresses never change. The layout (pages of whole heads) is that of PagedAttention
    (Kwon et al., 2023) as the paged kernels of today take it. `keys` and `values` are those of all
    layers, [L, P, page, K, D] and [L, P, page, K, Dv].

    Args:
        arena: where the memory comes from (tag "kv").
        num_layers: layers of the group. num_pages: pages with the padding page.
        page_size: tokens a page. num_kv_heads: KV heads on this rank.
        head_dim: size of a key. v_head_dim: size of a value.
        dtype: float32, bfloat16 or float16.

    Raises:
        UnsupportedError: another dtype.
        CapacityError: too little memory.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"A KV cache of {dtype} is not supported",
                why="quantised keys and values need scales, which this pool does not keep",
                remedy=f"Take one of {', '.join(str(known) for known in DTYPES)}",
            )
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.dtype = dtype
        pages = (num_layers, num_pages, page_size, num_kv_heads)
        self.keys = arena.allocate("kv", (*pages, head_dim), dtype, zero=False)
        self.values = arena.allocate("kv", (*pages, v_head_dim), dtype, zero=False)
        # [P, page, K, D], [P, page, K, Dv]
        self._layers = tuple(zip(self.keys, self.values, strict=True))
        self._slots = tuple((k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers)

    def key_value(self, layer: int) -> tuple[Tensor, Tensor]:
        """K [P, page, K, D] and V [P, page, K, Dv] of a layer, as they lie in the pool."""
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store fresh keys and values.

        Args:
            layer: index within the pool.
            slots: [T] int64; live slots differ, slot 0 (padding) may come any number of times.
            key: [T, K, D], of any float dtype.
            value: [T, K, Dv].
        """
        keys, values = self._slots[layer]  # [P * page, K, D], [P * page, K, Dv]
        keys.index_copy_(0, slots, key.to(self.dtype))
        values.index_copy_(0, slots, value.to(self.dtype))
