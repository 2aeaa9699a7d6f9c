"""Sampling kernels against the torch twins: same noise, same tokens kept, same token drawn."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

import triton
import triton.language as tl
from sampling_columns import DEVICE, INF, Row, columns_of, expected, sampled

from headrace.base.errors import UnsupportedError
from headrace.kernels import sampling_triton
from headrace.kernels.filters import filter_logits
from headrace.kernels.filters_triton import TILE, within_filters
from headrace.kernels.noise import gumbel_noise
from headrace.kernels.noise import noise_bits as twin_bits
from headrace.kernels.sampling_math_triton import (
    gumbel,
    gumbel_bound,
    key_token,
    key_value,
    noise_bits,
    noise_key,
    order_key,
)
from headrace.kernels.sampling_triton import SamplingScratch

VOCABULARY = 5003  # three tiles, the last one not full
ROWS = [
    Row(temperature=0.0),
    Row(temperature=0.7, seed=2**63 - 1),
    Row(temperature=1e-30, min_length=9, stop_ids=(3, 4, 70)),
    Row(temperature=0.0, presence=0.3, frequency=0.2, repetition=1.3, top_k=3),
    Row(top_k=5, seed=-5),
    Row(top_p=0.9, temperature=1.5),
    Row(top_k=700, top_p=0.95, min_p=0.001, biased=True, repetition=1.2),
    Row(min_p=0.1, biased=True, active=False),
]


def draw(samples: int, *, scale: float = 2.0, seed: int = 0, vocabulary: int = VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(samples, vocabulary, generator=generator) * scale).to(DEVICE)


def places(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.full((samples,), 8, dtype=torch.int32, device=DEVICE)
    return torch.arange(1, samples + 1, device=DEVICE), positions


@triton.jit
def _noise_kernel(seed, position, bits, values, bounds, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    random = noise_bits(noise_key(tl.load(seed + row), tl.load(position + row)), token)
    tl.store(bits + row * BLOCK + token, random)
    tl.store(values + row * BLOCK + token, gumbel(random))
    tl.store(bounds + row * BLOCK + token, gumbel_bound(random))


def test_noise_has_the_bits_of_the_twin() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345], device=DEVICE)
    positions = torch.tensor([0, 7, 131071, 2**40, 1, 5], device=DEVICE)
    shape = (len(seeds), 1 << 14)
    bits = torch.empty(shape, dtype=torch.int32, device=DEVICE)
    values, bounds = torch.empty(shape, device=DEVICE), torch.empty(shape, device=DEVICE)
    _noise_kernel[(len(seeds),)](
        seeds, positions, bits, values, bounds, BLOCK=shape[1], enable_fp_fusion=False
    )
    assert torch.equal(bits, (twin_bits(seeds, positions, shape[1], 0) >> 9) & 0x7FFFFF)
    twin = gumbel_noise(seeds, positions, shape[1])
    if DEVICE.type == "cuda":
        assert torch.equal(values, twin)
    else:  # two libraries' logarithms
        torch.testing.assert_close(values, twin, rtol=3e-7, atol=3e-7)
    assert (bounds >= values).all()


@triton.jit
def _bound_kernel(values, bounds, BLOCK: tl.constexpr):
    bits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + bits, gumbel(bits))
    tl.store(bounds + bits, gumbel_bound(bits))


def test_bound_is_above_the_noise_whatever_the_bits() -> None:
    values, bounds = (torch.empty(1 << 23, device=DEVICE) for _ in range(2))
    block = 1 << (10 if DEVICE.type == "cuda" else 20)
    _bound_kernel[((1 << 23) // block,)](values, bounds, BLOCK=block, enable_fp_fusion=False)
    assert (bounds >= values).all()
    assert values.isfinite().all()
    large = values > 8
    assert (bounds - values)[large].max() < 1e-3, "where tiles are decided the bound is close"


@triton.jit
def _key_kernel(values, found, tokens, TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    key = order_key(tl.load(values + place), place + TOKEN)
    tl.store(found + place, key_value(key))
    tl.store(tokens + place, key_token(key))


def test_keys_give_value_and_token_back() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, INF, -INF, 3e38, 1e-45], device=DEVICE)
    found, tokens = torch.empty_like(values), torch.empty(8, dtype=torch.int64, device=DEVICE)
    for token in (0, (1 << 20) - 8):
        _key_kernel[(1,)](values, found, tokens, TOKEN=token, BLOCK=8)
        assert torch.equal(found, values)
        assert tokens.tolist() == list(range(token, token + 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 has many ties
@pytest.mark.parametrize("samples", [2, 8])  # three programs a row, and one, in the interpreter
def test_tokens_are_those_of_the_twins(samples: int, dtype: torch.dtype) -> None:
    rows, positions = places(samples)
    wide = draw(samples, scale=3.0, seed=samples).to(dtype)
    chosen = ROWS if samples == len(ROWS) else ROWS[5:7]
    columns = columns_of(chosen, VOCABULARY)
    tokens, finite = sampled(wide, rows, positions, columns)
    twin_tokens, twin_finite = expected(wide, rows, positions, columns)
    assert tokens.tolist() == twin_tokens.tolist()
    assert finite.tolist() == twin_finite.tolist()


def test_without_filters_one_pass_gives_the_same() -> None:
    rows, positions = places(4)
    logits, columns = draw(4), columns_of(ROWS[:4], VOCABULARY)
    tokens, finite = sampled(logits, rows, positions, columns, filters=False)
    assert tokens.tolist() == expected(logits, rows, positions, columns)[0].tolist()
    assert finite.all()
    assert tokens.tolist() == sampled(logits, rows, positions, columns)[0].tolist()


def test_a_row_is_the_same_alone_in_a_batch_and_however_it_is_cut(monkeypatch) -> None:
    rows, positions = places(len(ROWS))
    logits, columns = draw(len(ROWS), scale=1.0), columns_of(ROWS, VOCABULARY)
    whole = sampled(logits, rows, positions, columns)[0].tolist()
    monkeypatch.setattr(sampling_triton, "multiprocessors", lambda device: 1000)
    for place in (1, 5, 6):
        one = slice(place, place + 1)
        alone, _ = sampled(logits[one], rows[one], positions[one], columns)
        assert alone.tolist() == whole[one]


def test_lowest_id_wins_ties_and_signed_zeros_are_equal() -> None:
    logits = torch.full((2, VOCABULARY), -1.0, device=DEVICE)
    logits[0, [4000, 2500, 2501]] = 7.0
    logits[1, 100], logits[1, 4000] = -0.0, 0.0
    columns = columns_of([Row(temperature=0.0)] * 2, VOCABULARY)
    assert sampled(logits, *places(2), columns, filters=False)[0].tolist() == [2500, 100]


def test_bad_rows_fail_alone() -> None:
    logits = draw(6)
    logits[0, 5000] = float("nan")
    logits[1, 17] = INF
    logits[2] = -INF
    logits[3, 3] = float("nan")  # a stop id, masked: still bad
    logits[5] = float("nan")
    chosen = [
        Row(top_k=4),
        Row(temperature=0.0),
        Row(top_p=0.5),
        Row(min_length=9, stop_ids=(3,)),
        Row(top_k=2),
        Row(active=False),
    ]
    rows, positions = places(6)
    columns = columns_of(chosen, VOCABULARY)
    tokens, finite = sampled(logits, rows, positions, columns)
    assert finite.tolist() == [False, False, False, False, True, True]
    twin = expected(logits, rows, positions, columns)[0].tolist()
    assert tokens.tolist() == [0, 0, 0, 0, twin[4], 0]


@triton.jit
def _kept_kernel(below, kept, search, min_p, V: tl.constexpr, TILE: tl.constexpr):
    sample, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < V
    values = tl.load(below + sample * V + ids, mask=inside, other=float("-inf"))
    stays = within_filters(values, tile, search, sample, tl.load(min_p + sample))
    tl.store(kept + sample * V + ids, stays, mask=inside)


FILTERS = [  # top_k, top_p, min_p
    (1, 1.0, 0.0),
    (50, 1.0, 0.0),
    (4999, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.0001, 0.0),
    (0, 0.99999994, 0.0),
    (0, 1.0, 0.05),
    (1000, 0.95, 0.0),
    (300, 0.3, 0.2),
]


SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("peaked", "equal")]


@pytest.mark.parametrize("kind", ["flat", "ties", "forbidden", *SLOWER])
def test_exactly_the_tokens_of_the_twin_are_kept(kind: str) -> None:
    logits = draw(len(FILTERS), scale=8.0 if kind == "peaked" else 1.0, seed=4)
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits.zero_()
    if kind == "forbidden":
        logits[:, 40:] = -INF
    chosen = [Row(top_k=k, top_p=p, min_p=m, temperature=0.8) for k, p, m in FILTERS]
    columns = columns_of(chosen, VOCABULARY)
    rows, positions = places(len(chosen))
    scratch = SamplingScratch.allocate(len(chosen), DEVICE)
    sampled(logits, rows, positions, columns, scratch=scratch)
    below = (logits - logits.amax(-1, keepdim=True)) / columns.temperature[rows, None]
    kept = torch.empty(logits.shape, dtype=torch.bool, device=DEVICE)
    grid = (len(chosen), triton.cdiv(VOCABULARY, TILE))
    _kept_kernel[grid](below, kept, scratch.search, columns.min_p[rows], V=VOCABULARY, TILE=TILE)
    twin = filter_logits(below, columns.top_k[rows], columns.top_p[rows], columns.min_p[rows])
    possible = below > -INF
    assert torch.equal(kept & possible, twin > -INF)


def test_scratch_serves_one_call_after_another() -> None:
    columns = columns_of(ROWS, VOCABULARY)
    scratch = SamplingScratch.allocate(20, DEVICE)
    rows, positions = places(len(ROWS))
    for seed, order in ((1, torch.arange(8)), (2, torch.arange(8).flip(0))):
        logits, index = draw(8, seed=seed), rows[order.to(DEVICE)]
        tokens, _ = sampled(logits, index, positions, columns, scratch=scratch)
        assert tokens.tolist() == expected(logits, index, positions, columns)[0].tolist()


def test_what_the_kernels_do_not_take_is_refused() -> None:
    columns = columns_of(ROWS[:1], 8)
    rows, positions = places(1)
    with pytest.raises(UnsupportedError, match="float64"):
        sampled(torch.zeros(1, 8, dtype=torch.float64, device=DEVICE), rows, positions, columns)
    wide = torch.zeros(1, 1, device=DEVICE).expand(1, (1 << 20) + 1)
    with pytest.raises(UnsupportedError, match="at most 1048576"):
        sampled(wide, rows, positions, columns)


def test_columns_come_from_any_object_that_has_them() -> None:
    columns = columns_of(ROWS[:1], 8)
    again = sampling_triton.SamplingColumns.of(columns)
    for field in dataclasses.fields(columns):
        assert getattr(again, field.name) is getattr(columns, field.name)
