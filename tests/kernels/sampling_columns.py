"""Columns of rows, logits and the torch twins put together for tests of the sampling kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.filters import filter_logits
from headrace.kernels.noise import gumbel_noise
from headrace.kernels.sampling_triton import SamplingColumns, SamplingScratch, sample_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IN_PROMPT = 1 << 30
INF = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Parameters of one row; every other column is drawn at random and must not matter."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_length: int = 0
    stop_ids: tuple[int, ...] = ()
    biased: bool = False
    seed: int = 1
    active: bool = True

    @property
    def penalised(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)


def columns_of(rows: Sequence[Row], vocabulary: int, stop_ids: int = 8) -> SamplingColumns:
    """Row i lies at place i + 1; place 0 is the padding row."""
    generator = torch.Generator().manual_seed(3)
    every = [Row(active=False), *rows]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in every], dtype=dtype, device=DEVICE)

    shape = (len(every), vocabulary)
    made = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 2, shape, generator=generator, dtype=torch.int32) * IN_PROMPT
    counts, bias = (made | prompt).to(DEVICE), torch.randn(shape, generator=generator).to(DEVICE)
    bias[:, 1::7] = -INF
    bias[~column("biased", torch.bool)] = float("nan")
    stops = [[*row.stop_ids, *[-1] * (stop_ids - len(row.stop_ids))] for row in every]
    real = {
        name: column(name, torch.float32)
        for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    }
    return SamplingColumns(
        **real,
        top_k=column("top_k", torch.int32),
        min_length=column("min_length", torch.int32),
        seed=column("seed", torch.int64),
        stop_ids=torch.tensor(stops, dtype=torch.int64, device=DEVICE),
        penalised=column("penalised", torch.bool),
        biased=column("biased", torch.bool),
        active=column("active", torch.bool),
        token_counts=counts,
        bias=bias,
    )


def expected(
    logits: Tensor, rows: Tensor, positions: Tensor, c: SamplingColumns
) -> tuple[Tensor, Tensor]:
    """Tokens [S] and finite [S] by the torch twins, in the sampler's order."""
    raw = logits.float()
    x = raw
    counts = c.token_counts[rows]
    made = counts & (IN_PROMPT - 1)
    factor = c.repetition[rows, None]
    penalised = torch.where(counts != 0, torch.where(x > 0, x / factor, x * factor), x)
    penalised = penalised - made.float() * c.frequency[rows, None]
    penalised = penalised - (made > 0).float() * c.presence[rows, None]
    x = torch.where(c.penalised[rows, None], penalised, x)
    x = torch.where(c.biased[rows, None], x + c.bias[rows], x)
    early = positions < c.min_length[rows]
    ids = torch.arange(x.shape[1], device=x.device)
    stops = (c.stop_ids[rows][:, :, None] == ids).any(1)
    x = x.masked_fill(early[:, None] & stops, -INF)
    peak = x.amax(-1)
    healthy = peak.isfinite() & (raw.amax(-1) < INF)
    heat = c.temperature[rows]
    random = (heat > 0) & healthy
    below = (x - peak[:, None]) / torch.where(random, heat, 1.0)[:, None]
    below = torch.where(random[:, None], below, 0.0)
    dropped = filter_logits(below, c.top_k[rows], c.top_p[rows], c.min_p[rows]) == -INF
    noise = gumbel_noise(c.seed[rows], positions.long(), x.shape[1])
    scores = noise.mul_(heat[:, None]).add_(x).masked_fill_(dropped, -INF)
    scores = torch.where(random[:, None], scores, x)
    return torch.where(healthy, scores.argmax(-1), 0), healthy | ~c.active[rows]


def sampled(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    *,
    filters: bool = True,
    pdl: bool = False,
    scratch: SamplingScratch | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and finite by the kernels; the scratch must come out as it went in."""
    scratch = scratch or SamplingScratch.allocate(len(logits), logits.device)
    best, bins = scratch.best.clone(), scratch.bins.clone()
    tokens = torch.full((len(logits),), -7, dtype=torch.int64, device=logits.device)
    finite = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    named = {"tokens": tokens, "finite": finite, "scratch": scratch}
    sample_tokens(logits, rows, positions, columns, filters=filters, pdl=pdl, **named)
    assert torch.equal(scratch.best, best)
    assert torch.equal(scratch.bins, bins)
    assert not scratch.arrived.any()
    return tokens, finite
