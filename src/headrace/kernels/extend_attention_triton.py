"""Paged extend attention in Triton: new tokens over a cached prefix and over each other.

A tile holds the query heads of one KV head for a few consecutive queries, head by head within a
query: each key block is read once for the group. Blocks outside the causal range and the window of
the tile are not visited. Meaning and shapes: `attention_twins.paged_extend`.

Runtime integers are not specialised: a model has one variant, however batches look.
"""

import triton
from torch import Tensor

from headrace.kernels.attention_math_triton import block_keys, check_layer, padded
from headrace.kernels.device_sizes import shared_memory
from headrace.kernels.extend_attention_kernels_triton import extend_kernel
from headrace.kernels.extend_attention_settings import (
    WHOLE_BLOCK,
    ExtendSettings,
    extend_settings,
)
from headrace.kernels.fused_math_triton import launch_options
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned
from headrace.kernels.whole_blocks_triton import slots_of, takes_blocks


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
    covered: int | None = None,
    settings: ExtendSettings | None = None,
    pdl: bool = False,
) -> Tensor:
    """`attention_twins.paged_extend`; padding rows of `out` are likewise left as they were.

    Args:
        covered: leading rows of `q` that belong to sequences, where the host knows it. Those that
            a sequence's length on the device leaves out become 0 (-inf in `lse`), so that `out`
            may come uninitialised.
        settings: `extend_settings` chooses if absent.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    layer = LayerExtend(
        q,
        k_cache,
        v_cache,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        settings=settings,
        pdl=pdl,
    )
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        out[covered or 0 :] = 0
    layer(
        q,
        page_table,
        extend_start,
        extend_lens,
        prefix_lens,
        max_extend=max_extend,
        out=out,
        lse=lse,
        covered=covered,
    )
    return out


class LayerExtend:
    """`paged_extend` of one layer, step after step: what its steps share is worked out once.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_extend`.

    Raises:
        UnsupportedError: as `paged_extend`.
    """

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        settings: ExtendSettings | None = None,
        pdl: bool = False,
    ) -> None:
        check_layer(q, k_cache, v_cache, pdl=pdl)
        heads, dim = q.shape[1:]
        page, self._kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
        group = heads // self._kv_heads
        row_bytes = (padded(dim) + padded(value_dim)) * q.element_size()
        if settings is None:
            settings = extend_settings(
                row_bytes=row_bytes,
                element=q.element_size(),
                shared_memory=shared_memory(q.device),
                by_block=all(takes_blocks(x, WHOLE_BLOCK) for x in (k_cache, v_cache)),
            )
        rows, block = max(padded(group), settings.rows), block_keys(row_bytes, settings.block_bytes)
        by_block = settings.by_block and all(takes_blocks(x, block) for x in (k_cache, v_cache))
        self._queries = rows // group
        self._caches, self._sinks = (k_cache, v_cache), sinks
        self._habits = (
            slots_of(k_cache, block) if by_block else None,
            slots_of(v_cache, block) if by_block else None,
            scale,
            soft_cap,
            window,
        )
        constants = {
            "GROUP": group,
            "ROWS": rows,
            "DIM": dim,
            "DIM_PAD": padded(dim),
            "VALUE_DIM": value_dim,
            "VALUE_PAD": padded(value_dim),
            "PAGE": page,
            "BLOCK": block,
            "K_STRIDES": k_cache.stride()[:3],
            "V_STRIDES": v_cache.stride()[:3],
            "STAGES": settings.stages,
            "PDL": pdl,
        }
        self._launch = KeptLaunches(
            extend_kernel, constants, num_warps=settings.warps, **launch_options(pdl)
        )

    def __call__(
        self,
        q: Tensor,
        page_table: Tensor,
        extend_start: Tensor,
        extend_lens: Tensor,
        prefix_lens: Tensor,
        *,
        max_extend: int,
        out: Tensor,
        lse: Tensor | None = None,
        covered: int | None = None,
    ) -> None:
        """Arguments: as of `paged_extend`; `out` is written."""
        batch, strides = extend_lens.shape[0], q.stride()
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        if batch == 0 or max_extend == 0 or q.shape[0] == 0:
            return
        self._launch(
            (strides, out.dtype, covered is None, aligned(q, out, lse)),
            (triton.cdiv(max_extend, self._queries), self._kv_heads, batch),
            q,
            *self._caches,
            page_table,
            extend_start,
            extend_lens,
            prefix_lens,
            self._sinks,
            out,
            lse,
            covered,
            *self._habits,
            page_table.stride(0),
            *strides[:2],
        )
