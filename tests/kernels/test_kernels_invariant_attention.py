"""One attention for decode and extend: against the twins, and bit for bit whatever is beside."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import Case, make

from headrace.kernels import attention_twins as twins
from headrace.kernels.decode_splits import MOST_PROGRAMS
from headrace.kernels.invariant_splits import (
    FIRST_KEYS,
    SplitScratch,
    most_splits,
    runs_of,
    split_of,
    split_start,
)

pytest.importorskip("triton", reason="the kernels need the triton package")
kernels = pytest.importorskip("headrace.kernels.invariant_attention_triton")

BRAIN, HALF = torch.bfloat16, torch.float16
TOLERANCE = {torch.float32: 2e-5, BRAIN: 2e-2, HALF: 3e-3}

# Rows of one query each, spread over so many programs.
DECODE = [
    (Case(seq_lens=(1, 16, 300), page=16), 1),
    (Case(seq_lens=(1, 0, 530), heads=(6, 2), dim=80, page=64, sinks=True, dtype=HALF), 3),
    (Case(seq_lens=(600, 7), heads=(8, 1), dim=32, page=64, dtype=BRAIN, window=280), 4),
    (Case(seq_lens=(300,), heads=(20, 1), value_dim=80, page=8, soft_cap=5.0, window=40), 2),
]
EXTEND = [
    Case(seq_lens=(5, 300), extend_lens=(5, 4), heads=(4, 2), dim=32, sinks=True),
    Case(seq_lens=(340, 9), extend_lens=(20, 1), heads=(8, 2), page=64, dtype=HALF, window=270),
    Case(seq_lens=(70,), extend_lens=(70,), value_dim=32, page=64, dtype=BRAIN, padding=3),
]


def attention(batch):
    return kernels.InvariantAttention(batch.q, batch.k_cache, batch.v_cache, **batch.options)


def outputs(batch):
    out = batch.q.new_zeros(*batch.q.shape[:2], batch.v_cache.shape[3])
    lse = torch.full(batch.q.shape[:2], -torch.inf, device=out.device)
    return {"out": out, "lse": lse}


def decode(batch, **options):
    found = outputs(batch)
    attention(batch).decode(batch.q, *batch.decode_arguments()[3:], **found, **options)
    return tuple(found.values())


def extend(batch, **options):
    found = outputs(batch)
    most = int(batch.extend_lens.max())
    attention(batch).extend(
        batch.q, *batch.extend_arguments()[3:], max_extend=most, **found, **options
    )
    return tuple(found.values())


def assert_agree(batch, found, meant):
    for each, twin in zip(found, meant, strict=True):
        tolerance = TOLERANCE[batch.case.dtype]
        torch.testing.assert_close(each.double(), twin.double(), rtol=tolerance, atol=tolerance)


def test_splits_lie_one_behind_the_other():
    for grows in (True, False):
        starts = [split_start(split, grows=grows) for split in range(60)]
        assert starts[:3] == [0, FIRST_KEYS, 2 * FIRST_KEYS]
        assert starts == sorted(set(starts))
        for split, (start, end) in enumerate(pairwise(starts)):
            assert split_of(start, grows=grows) == split_of(end - 1, grows=grows) == split
    assert split_start(59, grows=True) > 200_000 > split_start(59, grows=False)


def test_bounds_of_splits_and_runs():
    assert [most_splits(n, window=None) for n in (0, 1, 256, 257, 2049)] == [1, 1, 1, 2, 9]
    for window in (1, 2, 256, 257, 258, 1000):
        most = 1 + max(
            split_of(end, grows=False) - split_of(max(0, end - window + 1), grows=False)
            for end in range(3000)
        )
        assert most_splits(3000, window=window) == most
    assert runs_of(batch=1, kv_heads=8, splits=5) == 5
    assert runs_of(batch=64, kv_heads=8, splits=35) == MOST_PROGRAMS // (64 * 8)
    assert runs_of(batch=1000, kv_heads=8, splits=35) == 1


@pytest.mark.parametrize(("case", "runs"), DECODE, ids=lambda value: getattr(value, "name", None))
def test_decode_agrees_with_its_twin(case, runs):
    batch = make(case)
    meant = outputs(batch)
    twins.paged_decode(*batch.decode_arguments(), **batch.options, **meant)
    assert_agree(batch, decode(batch, runs=runs), meant.values())


@pytest.mark.parametrize("case", EXTEND, ids=lambda case: case.name)
def test_extend_agrees_with_its_twin(case):
    batch = make(case)
    meant = outputs(batch)
    twins.paged_extend(
        *batch.extend_arguments(), max_extend=max(case.extend_lens), **batch.options, **meant
    )
    assert_agree(batch, extend(batch), meant.values())


@pytest.mark.parametrize("window", [None, 280])
def test_a_query_has_the_same_bits_however_it_is_computed(window):
    """As the last of a prompt, of a chunk, or as a step of its own over several programs."""
    case = Case(seq_lens=(560,), heads=(4, 2), dim=16, page=64, window=window, dtype=HALF)
    step = make(case)
    # Keys that the decode step does not see, but earlier queries do, are numbers too.
    k_cache, v_cache = (cache.nan_to_num(0.5) for cache in (step.k_cache, step.v_cache))
    step = replace(step, k_cache=k_cache, v_cache=v_cache)
    expected = decode(step, runs=1)
    for runs in (2, 3):
        assert all(map(torch.equal, decode(step, runs=runs), expected))
    for new in (1, 7, 30):
        others = make(replace(case, extend_lens=(new,), seed=1)).q
        lengths = {
            "extend_lens": step.extend_lens * new,
            "prefix_lens": step.seq_lens - new,
        }
        chunk = replace(step, q=torch.cat((others[:-1], step.q)), **lengths)
        found = extend(chunk)
        assert torch.equal(found[0][-1:], expected[0])
        assert torch.equal(found[1][-1:], expected[1])


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    case = Case(seq_lens=(300, 5, 0, 520), heads=(4, 2), dim=16, page=64, dtype=BRAIN)
    batch = make(case)
    together = decode(batch, runs=2, max_seq_len=4000)
    for row in (0, 1, 3):
        alone = replace(
            batch,
            q=batch.q[row : row + 1],
            page_table=batch.page_table[row : row + 1],
            seq_lens=batch.seq_lens[row : row + 1],
        )
        for one, all_of_them in zip(decode(alone), together, strict=True):
            assert torch.equal(one, all_of_them[row : row + 1])


def test_page_sizes_change_no_bit():
    whole = make(Case(seq_lens=(300,), heads=(2, 1), dim=16, page=64, dtype=HALF))
    table = whole.page_table[:, :, None] * 16 + torch.arange(16, dtype=torch.int32)
    k_cache, v_cache = (
        cache.reshape(-1, 4, *cache.shape[2:]) for cache in (whole.k_cache, whole.v_cache)
    )
    paged = replace(whole, k_cache=k_cache, v_cache=v_cache, page_table=table.flatten(1))
    assert all(map(torch.equal, decode(whole), decode(paged)))


def test_scratch_is_reused_whatever_it_holds():
    batch = make(Case(seq_lens=(3, 0, 600), heads=(2, 1), dim=16, page=64))
    sizes = {"batch": 4, "heads": 2, "splits": 9, "value_dim": 16}
    scratch = SplitScratch.allocate(**sizes, device=batch.q.device)
    scratch.values.fill_(torch.nan)
    scratch.sums.fill_(torch.nan)
    assert scratch.holds(**sizes)
    assert not scratch.holds(**(sizes | {"batch": 5}))
    found = decode(batch, runs=3, scratch=scratch)
    assert all(map(torch.equal, found, decode(batch, runs=1)))


def test_places_of_queries_that_do_not_exist_become_zero():
    case = Case(seq_lens=(4, 3), extend_lens=(4, 3), heads=(2, 1), dim=16, padding=2)
    batch = make(case)
    shorter = replace(batch, extend_lens=batch.extend_lens - 2)
    found = outputs(batch)
    for each in found.values():
        each.fill_(7.0)
    attention(batch).extend(
        batch.q, *shorter.extend_arguments()[3:], max_extend=4, covered=7, **found
    )
    out, lse = found["out"], found["lse"]
    gone = [2, 3, 5, 6]
    assert not out[gone].any()
    assert torch.isneginf(lse[gone]).all()
    assert bool((out[7:] == 7.0).all())
    assert torch.equal(out[[0, 1, 4]], extend(batch)[0][[0, 1, 4]])


def test_no_tokens_are_no_launch(monkeypatch):
    batch = make(Case(seq_lens=(3,), heads=(2, 1), dim=16))
    monkeypatch.setattr(kernels, "attend_kernel", None)
    none = batch.q[:0]
    found = {"out": none.clone()}
    attention(batch).decode(none, batch.page_table[:0], batch.seq_lens[:0], **found)
    lengths = (batch.seq_lens[:0],) * 3
    attention(batch).extend(none, batch.page_table[:0], *lengths, max_extend=0, **found)
