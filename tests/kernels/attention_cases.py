"""Random paged batches and a naive attention to hold them against."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Shape of a batch. `seq_lens` count the new tokens; `extend_lens` are the last of them."""

    seq_lens: tuple[int, ...]
    extend_lens: tuple[int, ...] | None = None  # None: a decode step
    heads: tuple[int, int] = (4, 4)
    dim: int = 64
    value_dim: int | None = None
    page: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    padding: int = 0  # tokens at the end of q that belong to no sequence
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [
            "x".join(map(str, self.heads)),
            f"d{self.dim}" + (f"v{self.value_dim}" if self.value_dim else ""),
            f"page{self.page}",
            str(self.dtype).removeprefix("torch."),
            "len" + ".".join(map(str, self.seq_lens)),
        ]
        if self.extend_lens:
            parts.append("new" + ".".join(map(str, self.extend_lens)))
        parts += [f"window{self.window}"] if self.window else []
        parts += ["cap"] if self.soft_cap else []
        parts += ["sinks"] if self.sinks else []
        return "-".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of a case; every slot that no query sees, page 0 included, holds NaN."""

    case: Case
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    extend_start: Tensor
    extend_lens: Tensor
    prefix_lens: Tensor
    sinks: Tensor | None
    keys: list[Tensor]  # per sequence, contiguous [L, K, D]
    values: list[Tensor]

    @property
    def options(self) -> dict:
        case = self.case
        return {
            "scale": case.dim**-0.5,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
        }

    def decode_arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.page_table, self.seq_lens

    def extend_arguments(self) -> tuple[Tensor, ...]:
        lengths = self.extend_start, self.extend_lens, self.prefix_lens
        return self.q, self.k_cache, self.v_cache, self.page_table, *lengths

    def double(self) -> "Batch":
        return replace(
            self, q=self.q.double(), k_cache=self.k_cache.double(), v_cache=self.v_cache.double()
        )


def make(case: Case, device: torch.device = DEVICE) -> Batch:
    """Scatters random keys and values over shuffled pages of a pool full of NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, kv_heads = case.heads
    value_dim = case.value_dim or case.dim
    extend = case.extend_lens or tuple(min(length, 1) for length in case.seq_lens)
    # A decode step has a query per row, also for a row of length 0.
    tokens = sum(extend) + case.padding if case.extend_lens else len(case.seq_lens)

    counts = [-(-length // case.page) for length in case.seq_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # page 0 stays padding
    table = torch.zeros(len(counts), max(1, *counts) + 1, dtype=torch.int32)
    pool = (sum(counts) + 1, case.page, kv_heads)
    k_cache = torch.full((*pool, case.dim), math.nan, dtype=case.dtype)
    v_cache = torch.full((*pool, value_dim), math.nan, dtype=case.dtype)
    keys, values = [], []
    for row, (length, new) in enumerate(zip(case.seq_lens, extend, strict=True)):
        pages = [order.pop() for _ in range(counts[row])]
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        k = torch.randn(length, kv_heads, case.dim, generator=generator).to(case.dtype)
        v = torch.randn(length, kv_heads, value_dim, generator=generator).to(case.dtype)
        keys.append(k.to(device))
        values.append(v.to(device))
        first = max(0, length - new - case.window + 1) if case.window else 0
        position = torch.arange(first, length)
        slots = table[row, position // case.page].long(), position % case.page
        k_cache[slots], v_cache[slots] = k[first:], v[first:]
    q = torch.randn(tokens, heads, case.dim, generator=generator).to(case.dtype)
    if case.padding:
        q[-case.padding :] = math.nan
    starts = [sum(extend[:row]) for row in range(len(extend))]
    prefixes = [length - new for length, new in zip(case.seq_lens, extend, strict=True)]
    place = {"device": device, "dtype": torch.int32}
    return Batch(
        case=case,
        q=q.to(device),
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        page_table=table.to(device),
        seq_lens=torch.tensor(case.seq_lens, **place),
        extend_start=torch.tensor(starts, **place),
        extend_lens=torch.tensor(extend, **place),
        prefix_lens=torch.tensor(prefixes, **place),
        sinks=torch.randn(heads, generator=generator).to(device) if case.sinks else None,
        keys=keys,
        values=values,
    )


def naive(batch: Batch) -> tuple[Tensor, Tensor]:
    """Values [T, N, Dv] and lse [T, N] in float64, query by query, from plain formulas."""
    case = batch.case
    heads, kv_heads = case.heads
    values = torch.zeros(*batch.q.shape[:2], batch.v_cache.shape[3], dtype=torch.float64)
    sums = torch.full(batch.q.shape[:2], -math.inf, dtype=torch.float64)
    decode = case.extend_lens is None
    for row, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        k, v = (rows.cpu().double().repeat_interleave(heads // kv_heads, 1) for rows in (k, v))
        for index in range(int(batch.extend_lens[row])):
            token = row if decode else int(batch.extend_start[row]) + index
            position = int(batch.prefix_lens[row]) + index
            first = max(0, position - case.window + 1) if case.window else 0
            sight = slice(first, position + 1)
            q = batch.q[token].cpu().double()
            logits = torch.einsum("nd,cnd->nc", q, k[sight]) * case.dim**-0.5
            if case.soft_cap:
                logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
            exponentials = logits.exp()
            total = exponentials.sum(1)
            if batch.sinks is not None:
                total = total + batch.sinks.cpu().double().exp()
            values[token] = torch.einsum("nc,cnd->nd", exponentials, v[sight]) / total[:, None]
            sums[token] = total.log()
    return values.to(batch.q.device), sums.to(batch.q.device)
