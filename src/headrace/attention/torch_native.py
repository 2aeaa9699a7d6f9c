"""Paged attention in plain torch: any device, any head shape, any page size."""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.attention.capabilities import AttentionCapabilities
from headrace.attention.native_math import explicit, fused
from headrace.attention.native_tiles import Tile, make_tiles, tile_mask
from headrace.attention.registry import register_attention_backend
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.persona import KvKind

DTYPES = frozenset({"float32", "bfloat16", "float16"})


@register_attention_backend("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Gathers the keys and values of similar rows and gives them to torch.

    It always reads the pool: of a prefill, the fresh keys and values would save a gather that costs
    under a hundredth of the products that follow it.
    """

    capabilities: ClassVar = AttentionCapabilities(
        kv_kinds=frozenset({KvKind.FULL, KvKind.WINDOW}),
        platforms=None,
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        mixed_dtypes=True,
        page_sizes=None,
        head_dims=None,
        sliding_window=True,
        soft_cap=True,
        sinks=True,
        graph_decode=False,  # its sizes follow the lengths
        graph_prefill=False,
        needs_exact_host_lengths=False,
        deterministic=False,  # sums are cut by the length of the longest row beside
        speculation=False,
    )

    _tiles: dict[int | None, tuple[Tile, ...]]

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._tiles = {}
        self._tiles_of(self.group.window, batch)

    def forward(
        self,
        q: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        kv: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """As `AttentionBackend.forward`; tokens that see nothing get 0 (and -inf in `lse`)."""
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_heads, layer.v_head_dim)
        covered = sum(batch.bounds.extend_lens)
        if covered < q.shape[0]:
            out[covered:] = 0
            if lse is not None:
                lse[covered:] = float("-inf")
        keys, values = (part.flatten(0, 1) for part in layer.pool.key_value(layer.pool_layer))
        for tile in self._tiles_of(layer.window, batch):
            _attend(tile, q, keys, values, layer, out, lse)
        return out

    def _tiles_of(self, window: int | None, batch: ForwardBatch) -> tuple[Tile, ...]:
        """Tiles of this step; layers whose window differs from their group's have their own."""
        if window not in self._tiles:
            self._tiles[window] = make_tiles(
                batch,
                self.group.name,
                window=window,
                key_elements=self.attention.num_kv_heads * self.attention.head_dim,
                dtype=self.dtype,
            )
        return self._tiles[window]


def _attend(
    tile: Tile,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes the tile's part of out [T, N, Dv] and lse [T, N]; keys, values are [slots, K, D]."""
    queries = torch.unflatten(q[tile.tokens], 0, (tile.rows, tile.queries))  # [b, E, N, D]
    shape = (tile.rows, tile.keys)
    k, v = (
        torch.unflatten(part.index_select(0, tile.slots).to(q.dtype), 0, shape)
        for part in (keys, values)
    )  # [b, C, K, D], [b, C, K, Dv]
    mask = tile_mask(tile, q.dtype)
    sums = None
    if layer.soft_cap is None and layer.sinks is None and lse is None:
        result = fused(queries, k, v, mask, layer.scale)
    else:
        result, sums = explicit(
            queries, k, v, mask, layer.scale, soft_cap=layer.soft_cap, sinks=layer.sinks
        )
    if tile.dead is not None:
        result = result.masked_fill(tile.dead[:, :, None, None], 0)
    _put(out, tile, result)
    if lse is not None and sums is not None:
        if tile.dead is not None:
            sums = sums.masked_fill(tile.dead[:, :, None], float("-inf"))
        _put(lse, tile, sums)


def _put(target: Tensor, tile: Tile, part: Tensor) -> None:
    """Writes part [b, E, ...] to the tile's tokens of target [T, ...]."""
    part = part.flatten(0, 1)
    if isinstance(tile.tokens, slice):
        target[tile.tokens] = part
    elif tile.real is None:
        target.index_copy_(0, tile.tokens, part)
    else:
        target.index_copy_(0, tile.tokens[tile.real], part[tile.real])
