"""Paged decode attention in Triton: split-KV, all query heads of a KV head in one program.

Reading K and V once is the whole cost of decode. The heads of a group share each block they read,
and a row's keys are cut over several programs when the batch alone does not fill the device
(flash-decoding, Dao et al., 2023). Meaning and shapes: `attention_twins.paged_decode`.

Runtime integers are not specialised, and strides of the pool are constants of a model: a model has
two variants (one split, several) and the combine kernel, however batches look.

`tables_ready`, and what a program does before its wait: `decode_attention_kernels_triton`.
"""

import torch
from torch import Tensor

from headrace.kernels.attention_math_triton import block_keys, check_layer, padded
from headrace.kernels.decode_attention_kernels_triton import combine_kernel, decode_kernel
from headrace.kernels.decode_attention_settings import DecodeSettings, decode_settings
from headrace.kernels.decode_splits import DecodeScratch, decode_splits
from headrace.kernels.device_sizes import multiprocessors
from headrace.kernels.fused_math_triton import launch_options
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned

COMBINE_BLOCK = 16  # splits that the combine kernel reads at once
COMBINE_WARPS = 4


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_seq_len: int | None = None,
    splits: int | None = None,
    scratch: DecodeScratch | None = None,
    share: Tensor | None = None,
    settings: DecodeSettings | None = None,
    pdl: bool = False,
    tables_ready: bool = False,
) -> Tensor:
    """`attention_twins.paged_decode`, with the kernel's own arguments.

    Args:
        max_seq_len: host bound on `seq_lens` for the choice of splits; results do not depend on it.
        splits: programs per row and KV head; `decode_splits` chooses if absent. A constant makes a
            row's result the same bits in every batch.
        scratch: where splits meet; allocated if absent and needed.
        share: [1] int32, keys that a program should have: a row is cut into as many runs as its own
            length asks for, at most `splits`, and a row of one run needs no second kernel's work.
        settings: of a program; `decode_settings` chooses if absent. Constant ones make a row's
            result the same bits in every batch.
        pdl: programmatic dependent launch.
        tables_ready: with `pdl`, promises that `page_table` and `seq_lens` are complete before
            anything of this call can start: whatever wrote them and this call have a kernel between
            them that was launched without dependent launch, which is a barrier.

    Raises:
        UnsupportedError: device, dtype, head size or page size the kernel does not take, or `pdl`
            before Hopper.
    """
    layer = LayerDecode(
        q,
        k_cache,
        v_cache,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        pdl=pdl,
    )
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    layer(
        q,
        page_table,
        seq_lens,
        out=out,
        lse=lse,
        max_seq_len=max_seq_len,
        splits=splits,
        scratch=scratch,
        share=share,
        settings=settings,
        tables_ready=tables_ready,
    )
    return out


class LayerDecode:
    """`paged_decode` of one layer, step after step: what its steps share is worked out once.

    Args:
        q: some queries of the layer; those of a step have their dtype, number of heads and size.
        k_cache, v_cache: the layer's keys and values. The rest: as for `paged_decode`.

    Raises:
        UnsupportedError: as `paged_decode`.
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
        pdl: bool = False,
    ) -> None:
        check_layer(q, k_cache, v_cache, pdl=pdl)
        self._caches, self._heads, self._dim = (k_cache, v_cache), *q.shape[1:]
        self._kv_heads, self._value_dim = v_cache.shape[2:]
        self._row_bytes = (padded(self._dim) + padded(self._value_dim)) * q.element_size()
        self._scale, self._window, self._soft_cap, self._sinks = scale, window, soft_cap, sinks
        self._pdl, self._multiprocessors = pdl, multiprocessors(q.device)
        self._launches: dict[tuple[DecodeSettings, bool], tuple[KeptLaunches, KeptLaunches]] = {}

    def __call__(
        self,
        q: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        max_seq_len: int | None = None,
        splits: int | None = None,
        scratch: DecodeScratch | None = None,
        share: Tensor | None = None,
        settings: DecodeSettings | None = None,
        tables_ready: bool = False,
    ) -> None:
        """Arguments: as of `paged_decode`; `out` is written."""
        batch, strides = q.shape[0], q.stride()
        assert strides[2] == 1
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        if batch == 0:
            return
        if splits is None:
            splits = self._splits(batch, max_seq_len or page_table.shape[1] * self._page)
        if settings is None:
            settings = decode_settings(
                batch=batch, kv_heads=self._kv_heads, multiprocessors=self._multiprocessors
            )
        if splits > 1:
            scratch = self._scratch(scratch, batch, splits, q.device)
        else:
            scratch = share = None
        parts = (None, None) if scratch is None else (scratch.values, scratch.lse)
        key = (strides, out.dtype, aligned(q, out, lse, *parts, share))
        launches = self._launches.get((settings, tables_ready))
        if launches is None:
            launches = self._launches[settings, tables_ready] = self._make_launches(
                settings, tables_ready
            )
        decode, combine = launches
        decode(
            key,
            (self._kv_heads, batch, splits),
            q,
            *self._caches,
            page_table,
            seq_lens,
            self._sinks,
            out,
            lse,
            *parts,
            share,
            self._scale,
            self._soft_cap,
            self._window,
            page_table.stride(0),
            *strides[:2],
        )
        if scratch is not None:
            combine(
                key,
                (batch, self._heads, 1),
                *parts,
                seq_lens,
                share,
                self._sinks,
                out,
                lse,
                splits,
                self._window,
            )

    @property
    def _page(self) -> int:
        return self._caches[0].shape[1]

    def _splits(self, batch: int, max_seq_len: int) -> int:
        return decode_splits(
            batch=batch,
            kv_heads=self._kv_heads,
            max_seq_len=max_seq_len,
            multiprocessors=self._multiprocessors,
            window=self._window,
        )

    def _scratch(
        self, given: DecodeScratch | None, batch: int, splits: int, device: torch.device
    ) -> DecodeScratch:
        sizes = {"batch": batch, "heads": self._heads, "splits": splits}
        if given is None:
            return DecodeScratch.allocate(**sizes, value_dim=self._value_dim, device=device)
        assert given.holds(**sizes, value_dim=self._value_dim)
        return given

    def _make_launches(
        self, settings: DecodeSettings, tables_ready: bool
    ) -> tuple[KeptLaunches, KeptLaunches]:
        """Those of the kernel itself and of the one that combines splits."""
        group = self._heads // self._kv_heads
        block = block_keys(self._row_bytes, settings.block_bytes)
        values = {"VALUE_DIM": self._value_dim, "VALUE_PAD": padded(self._value_dim)}
        constants = {
            "GROUP": group,
            "GROUP_PAD": padded(group),
            "DIM": self._dim,
            "DIM_PAD": padded(self._dim),
            **values,
            "PAGE": self._page,
            "BLOCK": block,
            "K_STRIDES": self._caches[0].stride()[:3],
            "V_STRIDES": self._caches[1].stride()[:3],
            "EARLY": settings.early if self._pdl and tables_ready else 0,
        }
        promises = {"TABLES_READY": tables_ready, "PDL": self._pdl}
        options = launch_options(self._pdl)
        decode = KeptLaunches(
            decode_kernel,
            constants | promises,
            num_warps=settings.warps,
            num_stages=settings.stages,
            **options,
        )
        combine = KeptLaunches(
            combine_kernel,
            {"KEYS": block, "BLOCK": COMBINE_BLOCK, **values, **promises},
            num_warps=COMBINE_WARPS,
            **options,
        )
        return decode, combine
