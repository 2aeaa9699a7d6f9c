"""The torch twins against plain formulas in float64, and against torch's own attention."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make, naive
from torch.nn import functional as F

from headrace.kernels.attention_twins import paged_decode, paged_extend

DECODE = [
    Case(seq_lens=(1, 15, 16, 17, 200)),
    Case(seq_lens=(3, 0, 33), heads=(6, 2), dim=80, page=1),
    Case(seq_lens=(5, 64, 65), heads=(8, 1), dim=96, value_dim=64, page=64, sinks=True),
    Case(seq_lens=(1, 7, 8, 9, 50), heads=(6, 2), window=8, page=4),
    Case(seq_lens=(40, 2), window=1, soft_cap=2.0, page=128),
    Case(seq_lens=(0, 21), heads=(32, 8), window=16, soft_cap=3.0, sinks=True, page=8),
]
EXTEND = [
    Case(seq_lens=(1, 15, 16, 17), extend_lens=(1, 15, 16, 17)),
    Case(seq_lens=(30, 0, 17), extend_lens=(7, 0, 17), heads=(6, 2), dim=80, page=1, padding=5),
    Case(seq_lens=(65, 9), extend_lens=(1, 3), heads=(8, 1), value_dim=96, page=64, sinks=True),
    Case(seq_lens=(50, 12), extend_lens=(20, 12), window=8, page=4),
    Case(seq_lens=(50, 12), extend_lens=(20, 12), window=1, soft_cap=2.0, page=128),
    Case(
        seq_lens=(40, 0, 21),
        extend_lens=(9, 0, 21),
        heads=(32, 8),
        window=16,
        soft_cap=3.0,
        sinks=True,
        padding=2,
    ),
]


def decode(batch, **options):
    return paged_decode(*batch.decode_arguments(), **batch.options, **options)


def extend(batch, **options):
    return paged_extend(
        *batch.extend_arguments(),
        **batch.options,
        max_extend=max(batch.case.extend_lens) + 2,
        **options,
    )


def run(case, batch, **options):
    return (decode if case.extend_lens is None else extend)(batch, **options)


@pytest.mark.parametrize("case", DECODE + EXTEND, ids=lambda case: case.name)
def test_twin_says_what_the_formulas_say(case):
    batch = make(case).double()
    values, sums = naive(batch)
    lse = torch.full_like(sums, -math.inf)
    torch.testing.assert_close(run(case, batch, lse=lse), values, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, sums, rtol=0, atol=1e-6)  # sinks are float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_inputs(dtype):
    case = Case(seq_lens=(200, 33), heads=(6, 2), dtype=dtype)
    batch = make(case)
    values, sums = naive(batch)
    lse = torch.empty(2, 6, device=batch.q.device)
    out = decode(batch, lse=lse)
    assert out.dtype == dtype
    torch.testing.assert_close(lse, sums.float(), rtol=0, atol=1e-5)
    # Only the last rounding to the output's type is left.
    torch.testing.assert_close(out, values.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 13])
def test_twin_agrees_with_scaled_dot_product_attention(prefix):
    new = 20
    case = Case(seq_lens=(prefix + new,), extend_lens=(new,), heads=(6, 2))
    batch = make(case)
    mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix).to(batch.q.device)
    expected = F.scaled_dot_product_attention(
        batch.q.transpose(0, 1),
        batch.keys[0].transpose(0, 1),
        batch.values[0].transpose(0, 1),
        attn_mask=mask,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(extend(batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"window": 9}, {"window": None}, {"soft_cap": 2.5}, {"soft_cap": None}, {"sinks": None}],
    ids=str,
)
@pytest.mark.parametrize("extend_lens", [None, (11,)])
def test_every_trait_shows_in_the_result(change, extend_lens):
    case = Case(seq_lens=(40,), extend_lens=extend_lens, window=8, soft_cap=2.0, sinks=True)
    batch = make(case)
    values, _ = naive(batch)
    # Windows wider than the case's reach the planted NaN: fill it, to see a number.
    wider = replace(batch, k_cache=batch.k_cache.nan_to_num(0.5))
    wider = replace(wider, v_cache=batch.v_cache.nan_to_num(0.5))
    named = {**batch.options, **change}
    if extend_lens is None:
        out = paged_decode(*wider.decode_arguments(), **named)
    else:
        out = paged_extend(*wider.extend_arguments(), **named, max_extend=11)
    assert (out - values).abs().max() > 1e-3


@pytest.mark.parametrize("case", [DECODE[5], EXTEND[1], EXTEND[5]], ids=lambda case: case.name)
def test_unseen_slots_change_nothing(case):
    batch = make(case)
    filled = replace(
        batch,
        q=batch.q.nan_to_num(7.0),
        k_cache=batch.k_cache.nan_to_num(3.0),
        v_cache=batch.v_cache.nan_to_num(3.0),
    )
    assert batch.k_cache.isnan().any()
    assert torch.equal(run(case, batch), run(case, filled))


def test_padding_queries_are_zero_in_a_new_output_and_untouched_in_a_given_one():
    case = Case(seq_lens=(5, 9), extend_lens=(3, 4), padding=6)
    batch = make(case)
    given = torch.full_like(batch.q, 42.0)
    lse = torch.full(given.shape[:2], 42.0, device=given.device)
    fresh, returned = extend(batch), extend(batch, out=given, lse=lse)
    assert returned is given
    assert (fresh[7:] == 0).all()
    assert (given[7:] == 42).all()
    assert (lse[7:] == 42).all()
    assert torch.equal(fresh[:7], given[:7])
    assert (lse[:7] < 42).all()


def test_empty_row_gives_zero_and_minus_infinity():
    case = Case(seq_lens=(0, 4), sinks=True)
    lse = torch.empty(2, 4)
    batch = make(case)
    out = decode(batch, lse=(lse := lse.to(batch.q.device)))
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()


def test_host_bound_cuts_work_not_results():
    batch = make(Case(seq_lens=(5, 17), page=16))
    torch.testing.assert_close(decode(batch, max_seq_len=17), decode(batch), rtol=0, atol=1e-6)


def test_no_tokens_are_legal():
    batch = make(Case(seq_lens=(4, 4), extend_lens=(0, 0)))
    assert extend(batch).shape == (0, 4, 64)
    nothing = batch.q.new_zeros(0, 4, 64)
    out = paged_decode(
        nothing, batch.k_cache, batch.v_cache, batch.page_table[:0], batch.seq_lens[:0], scale=1.0
    )
    assert out.shape == (0, 4, 64)
