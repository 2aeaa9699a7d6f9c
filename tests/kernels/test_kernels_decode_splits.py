"""The host rule for split-KV decode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.decode_splits import (
    KEYS_PER_SPLIT,
    MAX_SPLITS,
    decode_splits,
    fair_share,
    most_runs,
)


@pytest.mark.parametrize(
    ("batch", "max_seq_len", "splits"),
    [(1, 1024, 16), (1, 8192, 32), (32, 1024, 2), (32, 4096, 2), (128, 1024, 1), (256, 1024, 1)],
)
def test_splits_are_those_measured_best_on_an_h200(batch, max_seq_len, splits):
    """8 KV heads, head size 128, 132 multiprocessors."""
    chosen = decode_splits(batch=batch, kv_heads=8, max_seq_len=max_seq_len, multiprocessors=132)
    assert chosen == splits


def test_window_bounds_the_keys():
    shape = {"batch": 1, "kv_heads": 1, "max_seq_len": 100_000, "multiprocessors": 132}
    assert decode_splits(**shape) == MAX_SPLITS
    assert decode_splits(**shape, window=512) == 512 // KEYS_PER_SPLIT
    assert decode_splits(**(shape | {"max_seq_len": 128}), window=512) == 128 // KEYS_PER_SPLIT


@given(
    batch=st.integers(0, 4096),
    kv_heads=st.integers(1, 64),
    max_seq_len=st.integers(0, 1 << 20),
    multiprocessors=st.integers(1, 300),
    window=st.none() | st.integers(1, 1 << 17),
)
def test_splits_are_few_powers_of_two_and_worth_their_while(
    batch, kv_heads, max_seq_len, multiprocessors, window
):
    splits = decode_splits(
        batch=batch,
        kv_heads=kv_heads,
        max_seq_len=max_seq_len,
        multiprocessors=multiprocessors,
        window=window,
    )
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    keys = max_seq_len if window is None else min(max_seq_len, window)
    assert splits == 1 or (splits - 1) * KEYS_PER_SPLIT < keys
    assert splits == 1 or splits * batch * kv_heads < 2 * multiprocessors + batch * kv_heads


@pytest.mark.parametrize(("batch", "runs"), [(1, 64), (32, 4), (64, 2), (128, 1), (4096, 1)])
def test_runs_are_bounded_by_the_programs(batch, runs):
    assert most_runs(batch=batch, kv_heads=8) == runs


def test_a_fair_share_gives_every_program_the_same_number_of_keys():
    lengths = torch.tensor([1056] * 32, dtype=torch.int32)
    assert fair_share(lengths, kv_heads=8, multiprocessors=132).tolist() == [1024]
    mixed = torch.tensor([100, 8000, 0], dtype=torch.int32)
    assert fair_share(mixed, kv_heads=8, multiprocessors=132).tolist() == [8100 * 8 // 264]
    assert fair_share(mixed, kv_heads=8, multiprocessors=132, window=500).tolist() == [
        KEYS_PER_SPLIT
    ]
