"""Sampling in Triton: from logits [S, V] to tokens, all parameters read from the rows' columns.

One pass over the logits changes them, adds the noise and takes the arg-max; filtered rows take that
pass for their peak, then the passes of `filters_triton`, then the arg-max of what is kept. Programs
share a row and meet in one 64-bit maximum of order keys, so the token does not depend on how the
row was cut. Nothing waits for the host and everything can be captured.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.device_sizes import multiprocessors
from headrace.kernels.filters_triton import (
    FIELDS,
    MAX_TILES,
    PASSES,
    TILE,
    begin_search,
    filters_of,
    is_filtered,
    narrow_kernel,
    within_filters,
)
from headrace.kernels.fused_math_triton import begin, check_fused, launch_options, wait
from headrace.kernels.sampling_math_triton import (
    SPOILED,
    changed,
    gumbel,
    gumbel_bound,
    key_token,
    key_value,
    last_to_arrive,
    noise_bits,
    noise_key,
    order_key,
    warped,
)

MAX_VOCABULARY = 1 << 20
_PROGRAMS_PER_MULTIPROCESSOR = 12
_WARPS = 4
_NO_KEY = -(1 << 63)
_ALONE, _FIRST, _FILTERED = (tl.constexpr(stage) for stage in range(3))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Columns of the rows that sampling reads, named and shaped as in the rows.

    [R] float32: temperature, top_p, min_p, presence, frequency, repetition; [R] int32: top_k,
    min_length; [R] int64: seed; [R] bool: penalised, biased, active; stop_ids [R, n] int64 padded
    with -1; token_counts [R, V] int32; bias [R, V] float32. All contiguous.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    seed: Tensor
    min_length: Tensor
    stop_ids: Tensor
    penalised: Tensor
    biased: Tensor
    token_counts: Tensor
    bias: Tensor
    active: Tensor

    @classmethod
    def of(cls, rows: object) -> "SamplingColumns":
        """The columns out of an object that has them as attributes."""
        return cls(**{field.name: getattr(rows, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingScratch:
    """Where the programs of a row meet; every call leaves it as it was. About 16 KiB a sample.

    best [S] int64, arrived [S] int32, peaks [S] float32, search [S, 16] int64, bins [S, 2048]
    int64. Calls that may run at the same time need scratch of their own.
    """

    best: Tensor
    arrived: Tensor
    peaks: Tensor
    search: Tensor
    bins: Tensor

    @classmethod
    def allocate(cls, samples: int, device: torch.device) -> "SamplingScratch":
        return cls(
            best=torch.full((samples,), _NO_KEY, dtype=torch.int64, device=device),
            arrived=torch.zeros(samples, dtype=torch.int32, device=device),
            peaks=torch.zeros(samples, dtype=torch.float32, device=device),
            search=torch.zeros(samples, FIELDS, dtype=torch.int64, device=device),
            bins=torch.zeros(samples, MAX_TILES, dtype=torch.int64, device=device),
        )


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    *,
    tokens: Tensor,
    finite: Tensor,
    scratch: SamplingScratch,
    filters: bool,
    pdl: bool = False,
) -> None:
    """One token for each of S samples, as the torch sampler draws it (without a host's mask).

    A live row is failed (`finite` False, token 0) when its logits hold NaN or +inf, or nothing is
    left to choose from. Ties go to the lowest id.

    Args:
        logits: [S, V] float32, bfloat16 or float16, last dimension without gaps; not written.
        rows: [S] int64.
        positions: [S] int32 or int64, tokens before the one that is sampled.
        tokens: [S] int64, written; finite: [S] bool, written.
        scratch: for at least S samples.
        filters: False leaves the passes of top-k, top-p and min-p out: no row of the step with a
            temperature may use them. True launches eight more kernels, whose programs end at once
            for rows without filters.
        pdl: programmatic dependent launch.

    Raises:
        UnsupportedError: device or dtype the kernels do not take, or a vocabulary beyond 2**20.
    """
    check_fused("sampling", logits, pdl=pdl)
    samples, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    if tiles > MAX_TILES or vocabulary > MAX_VOCABULARY:
        raise UnsupportedError(
            f"sampling by Triton got {vocabulary} tokens", why=f"it takes at most {MAX_VOCABULARY}"
        )
    assert logits.stride(1) == 1
    assert columns.token_counts.shape[1] == columns.bias.shape[1] == vocabulary
    assert scratch.best.shape[0] >= samples
    if samples == 0:
        return
    programs = multiprocessors(logits.device) * _PROGRAMS_PER_MULTIPROCESSOR
    grid = (max(1, min(tiles, programs // samples)), samples)
    named = {
        "VOCABULARY": vocabulary,
        "STRIDE": logits.stride(0),
        "STOP_IDS": columns.stop_ids.shape[1],
        "TILE": TILE,
        "PDL": pdl,
        "num_warps": _WARPS,
        "enable_fp_fusion": False,  # the twin rounds products and sums apart
        **launch_options(pdl),
    }
    c = columns
    changes = (
        *(c.presence, c.frequency, c.repetition, c.min_length, c.stop_ids),
        *(c.penalised, c.biased, c.token_counts, c.bias),
    )
    sources = (logits, rows, positions)
    state = (scratch.peaks, scratch.arrived, scratch.search)
    scored = (
        *(*sources, c.temperature, c.top_k, c.top_p, c.min_p, c.seed, *changes, c.active),
        *(tokens, finite, scratch.best, *state),
    )
    if not filters:
        _score_kernel[grid](*scored, STAGE=_ALONE.value, **named)
        return
    _score_kernel[grid](*scored, STAGE=_FIRST.value, **named)
    searched = (*sources, c.temperature, c.top_k, c.top_p, *changes, *state, scratch.bins)
    for step in range(PASSES):
        narrow_kernel[grid](step, *searched, **named)
    _score_kernel[grid](*scored, STAGE=_FILTERED.value, **named)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "positions", "tokens", "finite", "best", "peaks", "arrived", "search")
    ]
)
def _score_kernel(
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    presence,
    frequency,
    repetition,
    min_length,
    stop_ids,
    penalised,
    biased,
    token_counts,
    bias,
    active,
    tokens,
    finite,
    best,
    peaks,
    arrived,
    search,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    STOP_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
    STAGE: tl.constexpr,
):
    """One program: every so many tiles of one row. The last of a row writes its token."""
    begin(PDL)
    wait(PDL)
    sample = tl.program_id(1)
    if STAGE == _FILTERED:  # noqa: SIM102 (a constant and a value of the device)
        if not is_filtered(search, sample):
            return
    row = tl.load(rows + sample)
    position = tl.load(positions + sample).to(tl.int64)
    heat = tl.load(temperature + row)
    filters = 0
    if STAGE == _FIRST:
        if heat > 0:
            filters = filters_of(row, top_k, top_p, min_p, VOCABULARY)
        heat = tl.where(filters != 0, 0.0, heat)  # the peak is asked first
    key = noise_key(tl.load(seed + row), position)
    best_value, best_token = tl.full([], float("-inf"), tl.float32), 0
    sound = tl.full([TILE], 1, tl.int1)
    is_penalised, is_biased = tl.load(penalised + row), tl.load(biased + row)
    is_early = position < tl.load(min_length + row)
    for tile in range(tl.program_id(0), tl.cdiv(VOCABULARY, TILE), tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCABULARY
        place = logits + sample.to(tl.int64) * STRIDE + ids
        raw = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
        x = changed(
            raw,
            ids,
            inside,
            row,
            is_penalised,
            is_biased,
            is_early,
            presence,
            frequency,
            repetition,
            stop_ids,
            token_counts,
            bias,
            VOCABULARY,
            STOP_IDS,
        )
        sound &= (raw < float("inf")) & (x < float("inf"))  # NaN is not below
        if STAGE == _FILTERED:
            below = warped(x, tl.load(peaks + sample), heat)
            kept = within_filters(below, tile, search, sample, tl.load(min_p + row))
            x = tl.where(kept, x, float("-inf"))
        scores = x
        bits = tl.zeros([TILE], tl.int32)
        if heat > 0:
            bits = noise_bits(key, ids)
            scores = x + heat * gumbel_bound(bits)
        # Few tiles can beat what came before: only those take the exact noise.
        if tl.max(scores, 0) > best_value:
            if heat > 0:
                scores = x + heat * gumbel(bits)
            value = tl.max(scores, 0)
            if value > best_value:
                best_value = value
                best_token = tl.min(tl.where(scores == value, ids, VOCABULARY), 0)
    is_sound = tl.min(sound.to(tl.int32), 0) > 0
    found = tl.where(is_sound, order_key(best_value, best_token), SPOILED)
    tl.atomic_max(best + sample, found, sem="relaxed")
    if last_to_arrive(arrived + sample):
        found = tl.load(best + sample, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have read what one now sets back
        tl.store(best + sample, -9223372036854775808)
        value = key_value(found)
        healthy = (found != SPOILED) & (value > float("-inf"))
        tl.store(tokens + sample, tl.where(healthy, key_token(found), 0))
        if STAGE != _FILTERED:
            tl.store(finite + sample, healthy | (tl.load(active + row) == 0))
        if STAGE == _FIRST:
            tl.store(peaks + sample, value)
            begin_search(search, sample, tl.where(healthy, filters, 0))
