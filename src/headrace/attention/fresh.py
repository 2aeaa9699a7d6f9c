"""Attention of prompts that begin in this step, over contiguous keys and values, by torch.

Nothing lies before such a prompt: queries and keys are the same tokens, and the mask is causal.
Rows of one length that follow each other in the packed [T, N, D] are one call over strided views.

On Hopper cuDNN's kernel comes first: 452 TFLOP/s at 8 x 1024 tokens and 609 at 1 x 8192, where the
paged kernels of that day reached 343 and 515 (32 query and 8 KV heads of 128, bfloat16, H200,
2026-11-29). It plans anew for every pair of rows and length that it has not met.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.batch.forward_batch import ForwardBatch, KvGroup
from headrace.batch.protocols import AttentionLayer

CUDA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshRun:
    """Rows of one length, side by side.

    Attributes:
        row: the first, among the batch's. rows: how many. length: tokens of each.
        start: place of the first one's first token.
    """

    row: int
    rows: int
    length: int
    start: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.rows * self.length)


def fresh_runs(batch: ForwardBatch, first: int = 0) -> tuple[FreshRun, ...] | None:
    """The rows from `first` on as runs; `None` unless all of them are live prompts that begin here.

    A row without prefix has sampled nothing yet, so no stop token can have ended it: what the host
    counts is there. Padding and warm-up rows are not live, and `None`.
    """
    bounds, facts = batch.bounds, batch.facts
    if not batch.mode.is_extend or facts.live_tokens != facts.tokens:
        return None
    if bounds.seq_lens[first:] != bounds.extend_lens[first:]:
        return None
    return tuple(_runs(bounds.extend_lens, first))


def _runs(lengths: list[int], first: int) -> Iterator[FreshRun]:
    row, start = first, sum(lengths[:first])
    while row < len(lengths):
        length, rows = lengths[row], 1
        while row + rows < len(lengths) and lengths[row + rows] == length:
            rows += 1
        if length > 0:
            yield FreshRun(row=row, rows=rows, length=length, start=start)
        row, start = row + rows, start + rows * length


def is_plain(layer: AttentionLayer) -> bool:
    """Whether its logits are plain products and every query sees all that lies before it."""
    return layer.window is None and layer.soft_cap is None and layer.sinks is None


def run_slots(run: FreshRun, kv: KvGroup) -> Tensor:
    """Slots of a run's tokens in their order, [rows * length] int64."""
    page = kv.page_size
    pages = kv.page_table[run.row : run.row + run.rows, : -(-run.length // page)].long()
    within = torch.arange(page, device=pages.device)
    return (pages[..., None] * page + within).flatten(1)[:, : run.length].flatten()


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows [n, K, D] of a pool [P, page, K, D] of any strides."""
    if cache.is_contiguous():
        return cache.flatten(0, 1).index_select(0, slots)
    page = cache.shape[1]
    return cache[slots // page, slots % page]


def fresh_attention(q: Tensor, k: Tensor, v: Tensor, run: FreshRun, scale: float) -> Tensor:
    """Causal attention within each row of a run.

    Args:
        q: [rows * length, N, D]. k: [rows * length, K, D]. v: [rows * length, K, Dv].

    Returns: [rows * length, N, Dv].
    """
    shape = (run.rows, run.length)
    queries, keys, values = (part.unflatten(0, shape).transpose(1, 2) for part in (q, k, v))
    grouped = q.shape[1] > k.shape[1]
    kernels = sdpa_kernel(CUDA_KERNELS, set_priority=True) if q.is_cuda else nullcontext()
    with kernels:
        result = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
    return result.transpose(1, 2).flatten(0, 1)
