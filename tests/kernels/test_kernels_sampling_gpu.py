"""Sampling kernels at the size of a real vocabulary, captured, and never waiting."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

from sampling_columns import Row, columns_of, expected

from headrace.kernels.noise import gumbel_noise
from headrace.kernels.sampling_triton import SamplingColumns, SamplingScratch, sample_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 151936
KINDS = [
    Row(temperature=0.0),
    Row(temperature=0.7),
    Row(top_k=50, temperature=1.3),
    Row(top_p=0.95),
    Row(top_k=1000, top_p=0.8, repetition=1.1, presence=0.2),
    Row(min_p=0.02, biased=True, min_length=9999, stop_ids=(11, 12)),
]


def many_rows(samples: int) -> tuple[torch.Tensor, torch.Tensor, SamplingColumns]:
    columns = columns_of(KINDS, VOCABULARY)
    rows = torch.arange(samples, device="cuda") % len(KINDS) + 1
    positions = torch.arange(samples, dtype=torch.int32, device="cuda")
    return rows, positions, columns


def draw(samples: int, scale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(samples, VOCABULARY, generator=generator, device="cuda") * scale


def buffers(samples: int) -> dict[str, object]:
    return {
        "tokens": torch.empty(samples, dtype=torch.int64, device="cuda"),
        "finite": torch.empty(samples, dtype=torch.bool, device="cuda"),
        "scratch": SamplingScratch.allocate(samples, torch.device("cuda")),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.2, 1.3, 5.0])
def test_tokens_are_those_of_torch(scale: float, dtype: torch.dtype) -> None:
    rows, positions, columns = many_rows(96)
    out = buffers(96)
    for seed in range(3):
        logits = draw(96, scale, seed).to(dtype)
        sample_tokens(logits, rows, positions, columns, filters=True, **out)
        tokens, finite = expected(logits, rows, positions, columns)
        assert torch.equal(out["tokens"], tokens)
        assert torch.equal(out["finite"], finite)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("samples", [1, 5, 64])
def test_replays_of_a_graph_follow_the_buffers(samples: int, pdl: bool) -> None:
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    rows, positions, columns = many_rows(samples)
    out, logits = buffers(samples), torch.zeros(samples, VOCABULARY, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample_tokens(logits, rows, positions, columns, filters=True, pdl=pdl, **out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, rows, positions, columns, filters=True, pdl=pdl, **out)
    for seed in range(4):
        logits.copy_(draw(samples, 2.0, seed))
        positions.add_(1)
        rows.copy_(rows % len(KINDS) + 1)
        graph.replay()
        assert torch.equal(out["tokens"], expected(logits, rows, positions, columns)[0])


def test_draws_follow_the_softmax_of_what_is_kept() -> None:
    """Chi-square of 20,000 draws of one row at as many positions."""
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], device="cuda")
    logits = torch.full((1, 3000), float("-inf"), device="cuda")
    logits[0, 1000:2000:200], logits[0, 2999] = probabilities[:5].log(), probabilities[5].log()
    columns = columns_of([Row(top_k=4, seed=9)], 3000)
    draws = 20_000
    out = buffers(draws)
    rows = torch.ones(draws, dtype=torch.int64, device="cuda")
    positions = torch.arange(draws, dtype=torch.int32, device="cuda")
    wide = logits.expand(draws, 3000)  # one row of memory
    sample_tokens(wide, rows, positions, columns, filters=True, **out)
    counts = out["tokens"].bincount(minlength=3000)[1000:1800:200].double().cpu()
    wanted = (probabilities[:4] / probabilities[:4].sum()).double().cpu() * draws
    assert counts.sum() == draws
    assert ((counts - wanted) ** 2 / wanted).sum() < 22, "3 degrees of freedom: p below 1e-4"


def test_noise_of_torch_is_the_same_on_both_devices_but_for_the_last_place() -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([5, 1 << 33])
    there = gumbel_noise(seeds.cuda(), positions.cuda(), VOCABULARY).cpu()
    torch.testing.assert_close(
        there, gumbel_noise(seeds, positions, VOCABULARY), rtol=1e-6, atol=1e-6
    )
