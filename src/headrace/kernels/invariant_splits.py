"""Where the keys of a row are cut, whatever the batch: by their positions alone.

Attention sums the keys of a split in their order, and the splits in theirs. Who sums a split, a
program of its own or one that goes through all of them, then changes no bit. Short splits spread a
row of few keys over the device, long ones of a row of many keys are few: so they grow with the
position, except under a window, which sees no more than a few.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.decode_splits import most_runs

FIRST_KEYS = 256
"""Keys of the first splits; a multiple of every block of keys."""
SAME_LENGTH = 8
"""Splits of one length; the next ones are twice as long."""


def split_start(split: int, *, grows: bool) -> int:
    """Position of the first key of a split."""
    level, within = divmod(split, SAME_LENGTH) if grows else (0, split)
    return FIRST_KEYS * (SAME_LENGTH * ((1 << level) - 1) + (within << level))


def split_of(position: int, *, grows: bool) -> int:
    """The split that a position lies in."""
    if not grows:
        return position // FIRST_KEYS
    level = (position // (FIRST_KEYS * SAME_LENGTH) + 1).bit_length() - 1
    start = split_start(level * SAME_LENGTH, grows=True)
    return level * SAME_LENGTH + (position - start) // (FIRST_KEYS << level)


def most_splits(max_seq_len: int, *, window: int | None) -> int:
    """The most splits that keys of one query lie in."""
    if window is None:
        return split_of(max(1, max_seq_len) - 1, grows=True) + 1
    whole = max(1, -(-max_seq_len // FIRST_KEYS))
    return min(whole, (window + FIRST_KEYS - 2) // FIRST_KEYS + 1)


def runs_of(*, batch: int, kv_heads: int, splits: int) -> int:
    """Over how many programs a row's splits are spread; results do not depend on it."""
    return min(splits, most_runs(batch=batch, kv_heads=kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitScratch:
    """Where the splits of one decode call meet; may be shared by all layers.

    Shapes: `values` [B, N, S, Dv], not divided yet, `sums` [2, B, N, S] (the largest base-2 logit,
    the sum of exponentials), float32, contiguous; larger ones than a call needs are fine.
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def allocate(
        cls, *, batch: int, heads: int, splits: int, value_dim: int, device: torch.device
    ) -> "SplitScratch":
        shape = (batch, heads, splits)
        return cls(
            values=torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            sums=torch.empty((2, *shape), dtype=torch.float32, device=device),
        )

    def holds(self, *, batch: int, heads: int, splits: int, value_dim: int) -> bool:
        parts = batch * heads * splits
        return self.sums.numel() >= 2 * parts and self.values.numel() >= parts * value_dim
