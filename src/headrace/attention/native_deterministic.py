"""Paged attention in plain torch on a CPU, with the same bits in any batch."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention.backend import AttentionSetting
from headrace.attention.native_blocks import KEY_BLOCK, in_blocks, proven_query_rows
from headrace.attention.native_tiles import Tile, tile_mask
from headrace.attention.registry import register_attention_backend
from headrace.attention.torch_native import TorchNativeBackend
from headrace.base.errors import UnsupportedError
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer


@register_attention_backend("torch_native")
class DeterministicNativeBackend(TorchNativeBackend):
    """Always reads the pool, in blocks of keys that begin at fixed positions (`native_blocks`)."""

    capabilities: ClassVar = replace(
        TorchNativeBackend.capabilities,
        platforms=frozenset({"cpu"}),  # a GPU's library chooses by the number of products
        deterministic=True,
    )

    def __init__(self, setting: AttentionSetting) -> None:
        """Raises `UnsupportedError` where no number of queries gives each the same bits."""
        super().__init__(setting)
        attention = setting.attention
        self._query_rows = proven_query_rows(attention.head_dim, attention.v_head_dim)
        group = attention.num_heads // attention.num_kv_heads
        if not self._query_rows or self._query_rows[-1] < group:
            raise UnsupportedError(
                "deterministic cannot be honoured on this CPU",
                why="the library's products of attention depend on a query's place among others "
                f"with {torch.get_num_threads()} threads",
                remedy="leave deterministic off, or try fewer threads (OMP_NUM_THREADS)",
            )
        self._tiling = {
            "dtype": torch.float32,
            "tile_queries": self._query_rows[-1] // group,
            "key_block": KEY_BLOCK,
        }

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._tiles = {}
        self._tiles_of(self.group.window, batch)

    def _attend(
        self,
        tile: Tile,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: AttentionLayer,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        queries = q[tile.tokens].unflatten(0, (tile.rows, tile.queries))
        result, sums = in_blocks(
            queries,
            self._keys(keys, tile, keys.dtype).transpose(1, 2),  # [b, K, C, D]
            self._values(values, tile, values.dtype).transpose(1, 2),
            tile_mask(tile, torch.float32),
            layer.scale,
            query_rows=self._query_rows,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        return tile.clear_dead(result.flatten(0, 1), sums.flatten(0, 1))
