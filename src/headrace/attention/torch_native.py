"""Paged attention in plain torch: any device, any head shape, any page size."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import AttentionCapabilities
from headrace.attention.fresh import (
    FreshRun,
    fresh_attention,
    fresh_runs,
    is_plain,
    read_slots,
    run_slots,
)
from headrace.attention.native_math import explicit, fused
from headrace.attention.native_tiles import Tile, make_tiles, tile_mask
from headrace.attention.registry import register_attention_backend
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.persona import KvKind

DTYPES = frozenset({"float32", "bfloat16", "float16"})
SMALL_ELEMENTS = 1 << 16  # up to here an allocator has memory at hand
# Tokens that a run must have on the average to be worth a call of its own. A call costs the host
# of a GPU some 50 microseconds, in which the rest of a small model's layer does some 500 tokens.
RUN_TOKENS = {"cpu": 1}
RUN_TOKENS_ELSEWHERE = 512


@register_attention_backend("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Gathers the keys and values of similar rows and gives them to torch.

    A short row alone whose pages follow each other is read in place. Of a batch, a gather costs
    about as much as the attention itself, yet less than a call per row.

    Prompts that all begin in the step, in layers without window, soft cap and sinks, go to torch's
    causal attention without a mask (`fresh`), with the fresh keys and values where they are given
    in the dtype of the pool.
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

    def __init__(self, setting: AttentionSetting) -> None:
        super().__init__(setting)
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._tiling: dict[str, Any] = {"dtype": self.dtype}  # how they are cut
        self._runs: tuple[FreshRun, ...] = ()  # of a step of prompts that all begin in it
        self._slots: dict[FreshRun, Tensor] = {}
        self._keys, self._values = _Gather(), _Gather()

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._tiles, self._slots = {}, {}
        self._runs = self._worthwhile(fresh_runs(batch) or (), batch.num_tokens)
        if not self._runs:
            self._tiles_of(self.group.window, batch)

    def _worthwhile(self, runs: tuple[FreshRun, ...], tokens: int) -> tuple[FreshRun, ...]:
        least = RUN_TOKENS.get(self.device.type, RUN_TOKENS_ELSEWHERE)
        return runs if len(runs) == 1 or tokens >= least * len(runs) else ()

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
        if self._runs and is_plain(layer) and lse is None:
            return self._fresh(q, layer, batch, kv, out)
        tiles = self._tiles_of(layer.window, batch)
        keys, values = (part.flatten(0, 1) for part in layer.pool.key_value(layer.pool_layer))
        tokens = q.shape[0]
        if len(tiles) == 1 and out is None and lse is None and tiles[0].covers(tokens):
            return self._attend(tiles[0], q, keys, values, layer, with_lse=False)[0]
        if out is None:
            out = q.new_empty(tokens, layer.num_heads, layer.v_head_dim)
        covered = sum(batch.bounds.extend_lens)
        if covered < tokens:
            out[covered:] = 0
            if lse is not None:
                lse[covered:] = float("-inf")
        for tile in tiles:
            result, sums = self._attend(tile, q, keys, values, layer, with_lse=lse is not None)
            _put(out, tile, result)
            if lse is not None and sums is not None:
                _put(lse, tile, sums)
        return out

    def _fresh(
        self,
        q: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        kv: tuple[Tensor, Tensor] | None,
        out: Tensor | None,
    ) -> Tensor:
        """The runs of a step that has no other tokens."""
        cached = layer.pool.key_value(layer.pool_layer)
        if kv is not None and kv[0].dtype != cached[0].dtype:
            kv = None  # a later chunk sees what the pool has rounded
        covered = self._runs[-1].tokens.stop
        if out is None and (len(self._runs) > 1 or covered < q.shape[0]):
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        if out is not None:
            out[covered:] = 0
        for run in self._runs:
            if kv is None:
                if run not in self._slots:
                    self._slots[run] = run_slots(run, batch.kv[self.group.name])
                k, v = (read_slots(part, self._slots[run]).to(q.dtype) for part in cached)
            else:
                k, v = (part[run.tokens] for part in kv)
            result = fresh_attention(q[run.tokens], k, v, run, layer.scale)
            if out is None:
                return result
            out[run.tokens] = result
        assert out is not None, "there is a run"
        return out

    def _tiles_of(self, window: int | None, batch: ForwardBatch) -> tuple[Tile, ...]:
        """Tiles of this step; layers whose window differs from their group's have their own."""
        if window not in self._tiles:
            self._tiles[window] = make_tiles(
                batch,
                self.group.name,
                window=window,
                key_elements=self.attention.num_kv_heads * self.attention.head_dim,
                **self._tiling,
            )
        return self._tiles[window]

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
        """[b * E, N, Dv] and lse [b * E, N] of a tile over keys and values [slots, K, D]."""
        queries = q[tile.tokens].view(tile.rows, tile.queries, layer.num_heads, -1)
        k, v = self._keys(keys, tile, q.dtype), self._values(values, tile, q.dtype)
        mask = tile_mask(tile, q.dtype)
        sums = None
        if layer.soft_cap is None and layer.sinks is None and not with_lse:
            result = fused(queries, k, v, mask, layer.scale)
        else:
            result, sums = explicit(
                queries, k, v, mask, layer.scale, soft_cap=layer.soft_cap, sinks=layer.sinks
            )
            sums = sums.flatten(0, 1)
        return tile.clear_dead(result.flatten(0, 1), sums)


class _Gather:
    """Copies a tile's rows of the pool, large ones to memory that is kept from call to call.

    Fresh memory of megabytes would come from the system each time, and touching its pages costs a
    CPU several times what the copy does. It grows to the largest tile that was met.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, pool: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Pool [slots, K, D] -> [b, C, K, D]."""
        heads, dim = pool.shape[1:]
        count = tile.rows * tile.keys
        elements = count * heads * dim
        if isinstance(tile.slots, slice):
            rows = pool[tile.slots]
        elif elements <= SMALL_ELEMENTS:
            rows = pool.index_select(0, tile.slots)
        else:
            if self._memory is None or self._memory.shape[0] < elements:
                self._memory = pool.new_empty(elements)
            rows = self._memory[:elements].view(count, heads, dim)
            torch.index_select(pool, 0, tile.slots, out=rows)
        rows = rows.view(tile.rows, tile.keys, heads, dim)
        return rows if rows.dtype == dtype else rows.to(dtype)


def _put(target: Tensor, tile: Tile, part: Tensor) -> None:
    """Writes part [b * E, ...] to the tile's tokens of target [T, ...]."""
    if isinstance(tile.tokens, slice):
        target[tile.tokens] = part
    elif tile.real is None:
        target.index_copy_(0, tile.tokens, part)
    else:
        target.index_copy_(0, tile.tokens[tile.real], part[tile.real])
