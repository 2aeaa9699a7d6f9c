"""How many programs share one row's keys in split-KV decode, and the scratch they meet in.

The count is a host rule over bounds only: lengths stay on the device, so one captured graph serves
all lengths up to the bound. The idea is flash-decoding (Dao et al., 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPLITS = 64
# Fewer keys than this in a split cost more to combine than they save.
KEYS_PER_SPLIT = 64
# Programs per multiprocessor that keep an H200 near its memory rate.
PROGRAMS_PER_MULTIPROCESSOR = 2
# Of a decode call whose rows are cut by their own lengths.
MOST_PROGRAMS = 1024


def decode_splits(
    *, batch: int, kv_heads: int, max_seq_len: int, multiprocessors: int, window: int | None = None
) -> int:
    """Number of splits of a row's keys: a power of two from 1 to `MAX_SPLITS`.

    As many as fill the device when batch and heads alone do not, as long as a split of the longest
    row keeps `KEYS_PER_SPLIT` keys. A pure function of host numbers. The answer depends on the
    batch, and so does the order of additions: deterministic callers pass one constant instead.

    Args:
        batch: rows of the step, padding included.
        kv_heads: KV heads of this rank.
        max_seq_len: host bound on the rows' lengths, in tokens.
        multiprocessors: of the device.
        window: keys seen by the sliding window, if any.
    """
    keys = max_seq_len if window is None else min(max_seq_len, window)
    programs = max(1, batch * kv_heads)
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs)
    useful = -(-keys // KEYS_PER_SPLIT)
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def most_runs(*, batch: int, kv_heads: int) -> int:
    """Into how many runs a row may be cut by its own length (`fair_share`): 1 to `MAX_SPLITS`.

    Programs of runs that a row does not need end at once; `MOST_PROGRAMS` bounds them. With many
    rows a long one is hidden behind the others.
    """
    return max(1, min(MAX_SPLITS, MOST_PROGRAMS // max(1, batch * kv_heads)))


def fair_share(
    seq_lens: Tensor, *, kv_heads: int, multiprocessors: int, window: int | None = None
) -> Tensor:
    """[1] int32: keys of a program when all keys of a step are shared out evenly.

    Computed on the device from `seq_lens` [B] int32, so that one captured graph serves all lengths.
    """
    seen = seq_lens if window is None else seq_lens.clamp(max=window)
    keys = seen.sum(dtype=torch.int64) * kv_heads
    fair = keys // (PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    return fair.clamp(min=KEYS_PER_SPLIT).to(torch.int32)[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScratch:
    """Where the splits of one decode call leave their parts; may be shared by all layers.

    Shapes: `values` [B, N, S, Dv] and `lse` [B, N, S] (base 2), both float32, contiguous; larger
    batches and split counts than a call needs are fine, since only elements are counted.
    """

    values: Tensor
    lse: Tensor

    @classmethod
    def allocate(
        cls, *, batch: int, heads: int, splits: int, value_dim: int, device: torch.device
    ) -> "DecodeScratch":
        shape = (batch, heads, splits)
        return cls(
            values=torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            lse=torch.empty(shape, dtype=torch.float32, device=device),
        )

    def holds(self, *, batch: int, heads: int, splits: int, value_dim: int) -> bool:
        parts = batch * heads * splits
        return self.lse.numel() >= parts and self.values.numel() >= parts * value_dim
