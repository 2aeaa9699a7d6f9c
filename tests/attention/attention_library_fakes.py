"""Stand-ins for FlashInfer and sgl_kernel on the CPU: what their documentation says, by the twins.

They take the arguments that the backends give, by the same names, and are as strict about them as
the libraries are. Like the libraries, they multiply what they mask: a block of keys that holds a
number which is none spoils the result.
"""

import math
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.attention_twins import paged_extend

BLOCK = 32  # keys that sgl_kernel's stand-in reads at once


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer 0.6.12: `plan` sees the host, `run` the buffers on the device."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self.graph, self.planned = use_cuda_graph, 0
        self.buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype == torch.int32 for tensor in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(qo_indptr) > 1, "a plan has rows"
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        pages = paged_kv_indptr.diff()
        some = pages > 0
        assert (paged_kv_last_page_len[some] >= 1).all()
        assert (paged_kv_last_page_len <= page_size).all()
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        self.planned += 1
        if self.graph:
            for mine, theirs in zip(self.buffers, given, strict=True):
                assert mine is not None
                mine[: len(theirs)].copy_(theirs)
        else:
            assert len(paged_kv_indices) == paged_kv_indptr[-1]
            self.buffers = given
        self.rows_of_query = int(qo_indptr[-1])
        self.longest = self.lengths(page_size)
        self.shape = (num_qo_heads, head_dim_qk, page_size)
        self.dtypes = (q_data_type, kv_data_type)
        self.window_left, self.cap, self.scale = window_left, logits_soft_cap, sm_scale

    def lengths(self, page_size: int) -> Tensor:
        _, starts, _, last = self.buffers
        assert starts is not None
        assert last is not None
        pages = starts.diff()
        return torch.where(pages > 0, (pages - 1) * page_size + last, 0)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor | None,
        return_lse: bool,
    ) -> None:
        keys, values = paged_kv_cache
        heads, dim, page_size = self.shape
        assert q.shape == (self.rows_of_query, heads, dim)
        assert keys.shape[1] == page_size
        assert (q.dtype, keys.dtype) == self.dtypes
        assert keys.stride() == values.stride()
        assert out.is_contiguous()
        assert return_lse == (lse is not None)
        starts, page_starts, indices, _ = self.buffers
        assert starts is not None
        assert page_starts is not None
        assert indices is not None
        lengths = self.lengths(page_size)
        assert (lengths <= self.longest).all(), "longer than planned for"
        pages = page_starts.diff().tolist()
        table = torch.zeros(len(pages), max(*pages, 1), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(page_starts.tolist(), pages, strict=False)):
            table[row, :count] = indices[start : start + count]
        new = starts.diff()
        sums = torch.empty(q.shape[:2])
        paged_extend(
            q,
            keys,
            values,
            table,
            starts[:-1],
            new,
            lengths - new,
            max_extend=int(new.max()),
            scale=self.scale or q.shape[2] ** -0.5,
            window=None if self.window_left < 0 else self.window_left + 1,
            soft_cap=self.cap,
            out=out,
            lse=sums,
        )
        if lse is not None:
            lse.copy_(sums / math.log(2))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax_lse: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """sgl_kernel 0.4.4."""
    assert all(t.dtype == torch.int32 for t in (cache_seqlens, page_table, cu_seqlens_q))
    assert causal
    assert return_softmax_lse
    assert out.shape == (q.shape[0], q.shape[1], v_cache.shape[3])
    new = cu_seqlens_q.diff()
    assert int(cu_seqlens_q[-1]) == q.shape[0]
    assert int(new.max()) <= max_seqlen_q
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    page = k_cache.shape[1]
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for row, length in enumerate(cache_seqlens.tolist()):
        # Of a block that is looked at, every key up to the row's end must be a number.
        oldest = 0 if left < 0 else max(0, length - int(new[row]) - left)
        for position in range(oldest // BLOCK * BLOCK, length):
            place = int(page_table[row, position // page]), position % page
            assert v_cache[place].isfinite().all(), f"row {row} reads what is no number"
    lse = torch.empty(q.shape[:2])
    paged_extend(
        q,
        k_cache,
        v_cache,
        page_table,
        cu_seqlens_q[:-1],
        new,
        cache_seqlens - new,
        max_extend=max_seqlen_q,
        scale=softmax_scale,
        window=None if left < 0 else left + 1,
        soft_cap=softcap or None,
        out=out,
        lse=lse,
    )
    return out, lse.T.contiguous()


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    module.__path__ = []
    vars(module).update(contents)
    return module


MODULES = {
    module.__name__: module
    for module in (
        _module(
            "flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper
        ),
        _module("sgl_kernel"),
        _module("sgl_kernel.flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache),
    )
}
