"""The threshold of a row's filters without a sort: which tokens `filters.filter_logits` keeps.

In the order of tokens every filter keeps a first part. Top-k is a search by counting tokens, top-p
the same search by their masses, and what is searched for is a depth below the peak (the bits of a
float, 31 of them) and, where tokens of that depth are only partly kept, a token id. Each search
takes three passes over the row, a digit each, into a histogram of whole numbers (radix selection;
sums of whole numbers do not depend on the order of the atomics). A last pass finds the tile in
which the kept ties end. Passes a row has no use for end at once, and the last program of a row to
arrive draws the conclusion of a pass, so that the host only launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from headrace.kernels.fused_math_triton import begin, wait
from headrace.kernels.sampling_math_triton import (
    INFINITE,
    changed,
    depth,
    exact_exp,
    last_to_arrive,
    mass_of,
    warped,
)

TILE = 2048  # logits that a program holds at once
MAX_TILES = 2048  # also the bins of a histogram: the first digit has 11 bits, two have 10
_BINS = tl.constexpr(MAX_TILES)
_DIGIT = tl.constexpr(10)
_DIGIT_MASK = tl.constexpr(1023)

# A row's state of the search, int64 each.
FIELDS = 16
_FIELDS = tl.constexpr(FIELDS)
_FILTERS = tl.constexpr(0)  # which of the three bits below
_PREFIX = tl.constexpr(1)  # digits found
_BEFORE = tl.constexpr(2)  # weight of all tokens before the prefix
_GOAL = tl.constexpr(3)  # float64: a token stays if the weight before it is below
_LIMIT = tl.constexpr(4)  # depth of the last tokens kept
_KEPT = tl.constexpr(5)  # how many of that depth are kept,
_DROPPED = tl.constexpr(6)  # and how many are not
_TIE_TILE = tl.constexpr(7)  # tile in which the kept ones of that depth end,
_TIE_RANK = tl.constexpr(8)  # and how many of the tile are kept

_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)
_MIN_P = tl.constexpr(4)

# Passes: top-k digits 0 to 2, top-p digits 3 to 5, ties 6.
PASSES = 7
_TIES = tl.constexpr(6)


@triton.jit
def is_filtered(search, sample):
    return tl.load(search + sample * _FIELDS + _FILTERS) != 0


@triton.jit
def begin_search(search, sample, filters):
    """State of a row before the passes; `filters` 0: the row has none."""
    state = search + sample * _FIELDS
    tl.store(state + _FILTERS, filters)
    tl.store(state + _LIMIT, INFINITE)
    tl.store(state + _DROPPED, 0)
    tl.store(state + _TIE_TILE, _BINS)


@triton.jit
def filters_of(row, top_k, top_p, min_p, VOCABULARY: tl.constexpr):
    """Bits of the filters a row uses."""
    first = tl.load(top_k + row)
    filters = tl.where((first > 0) & (first < VOCABULARY), _TOP_K, 0)
    filters += tl.where(tl.load(top_p + row) < 1.0, _TOP_P, 0)
    return filters + tl.where(tl.load(min_p + row) > 0.0, _MIN_P, 0)


@triton.jit
def within_filters(below, tile, search, sample, likely):
    """Which tokens of a tile (`warped` logits) are kept."""
    state = search + sample * _FIELDS
    deep = depth(below)
    limit = tl.load(state + _LIMIT).to(tl.int32)
    tie_tile = tl.load(state + _TIE_TILE)
    tied = deep == limit
    if tile == tie_tile:
        tied = tied & (tl.cumsum(tied.to(tl.int32), 0) <= tl.load(state + _TIE_RANK))
    elif tile > tie_tile:
        tied = tied & (deep < limit)
    return ((deep < limit) | tied) & (exact_exp(below) >= likely)


@triton.jit(
    do_not_specialize=["step"],
    do_not_specialize_on_alignment=["rows", "positions", "peaks", "arrived", "search", "bins"],
)
def narrow_kernel(
    step,
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    presence,
    frequency,
    repetition,
    min_length,
    stop_ids,
    penalised,
    biased,
    token_counts,
    bias,
    peaks,
    arrived,
    search,
    bins,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    STOP_IDS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: every so many tiles of one row, for one pass."""
    begin(PDL)
    wait(PDL)
    sample = tl.program_id(1)
    state = search + sample * _FIELDS
    filters = tl.load(state + _FILTERS)
    wanted = (filters & tl.where(step < 3, _TOP_K, _TOP_P)) != 0
    if step == _TIES:
        wanted = (filters != 0) & (tl.load(state + _DROPPED) > 0)
    if not wanted:
        return
    row = tl.load(rows + sample)
    position = tl.load(positions + sample).to(tl.int64)
    peak, heat = tl.load(peaks + sample), tl.load(temperature + row)
    limit = tl.load(state + _LIMIT).to(tl.int32)
    prefix = tl.load(state + _PREFIX).to(tl.int32)
    digit = step % 3
    shift = 20 - digit * _DIGIT
    row_bins = bins + sample * _BINS
    is_penalised, is_biased = tl.load(penalised + row), tl.load(biased + row)
    is_early = position < tl.load(min_length + row)
    for tile in range(tl.program_id(0), tl.cdiv(VOCABULARY, TILE), tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCABULARY
        raw = tl.load(logits + sample.to(tl.int64) * STRIDE + ids, mask=inside, other=0.0)
        x = changed(
            raw.to(tl.float32),
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
        below = warped(x, peak, heat)
        deep = depth(below)
        bin = deep >> shift
        weight = tl.full([TILE], 1, tl.int64)
        if step == _TIES:
            inside &= deep == limit
            bin = tl.zeros_like(deep) + tile
        else:
            inside &= deep <= limit
            if digit > 0:
                inside &= (bin >> _DIGIT) == prefix
                bin = bin & _DIGIT_MASK
            if step >= 3:
                weight = mass_of(below)
        tl.atomic_add(row_bins + bin, weight, mask=inside & (weight > 0), sem="relaxed")
    if last_to_arrive(arrived + sample):
        _conclude(step, digit, row_bins, state, row, top_k, top_p)


@triton.jit
def _conclude(step, digit, row_bins, state, row, top_k, top_p):
    """Reads and clears a row's histogram, and writes what follows from it."""
    place = tl.arange(0, _BINS)
    weights = tl.load(row_bins + place, cache_modifier=".cg")
    tl.debug_barrier()  # threads clear other bins than they read: all must have read theirs
    tl.store(row_bins + place, tl.zeros([_BINS], tl.int64))
    if step == _TIES:
        before = tl.zeros([], tl.int64)
        goal = tl.load(state + _KEPT).to(tl.float64)
    elif digit == 0:
        before = tl.zeros([], tl.int64)
        goal = _goal(step, tl.sum(weights, 0), state, row, top_k, top_p)
        tl.store(state + _GOAL, goal.to(tl.int64, bitcast=True))
    else:
        before = tl.load(state + _BEFORE)
        goal = tl.load(state + _GOAL).to(tl.float64, bitcast=True)
    all_before = before + tl.cumsum(weights, 0) - weights  # [BINS], does not fall
    under = all_before.to(tl.float64) < goal
    chosen = tl.sum(under.to(tl.int64), 0) - 1
    before = tl.max(tl.where(under, all_before, 0), 0)
    if step == _TIES:
        tl.store(state + _TIE_TILE, chosen)
        tl.store(state + _TIE_RANK, tl.load(state + _KEPT) - before)
    else:
        if digit > 0:
            chosen += tl.load(state + _PREFIX) << _DIGIT
        tl.store(state + _PREFIX, chosen)
        tl.store(state + _BEFORE, before)
        if digit == 2:
            weight = tl.sum(tl.where(place == (chosen & _DIGIT_MASK), weights, 0), 0)
            _keep_ties(step, chosen, before, weight, goal, state)


@triton.jit
def _goal(step, total, state, row, top_k, top_p):
    """Weight at which the search ends: k tokens, or p of the mass that top-k left."""
    goal = tl.load(top_k + row).to(tl.float64)
    if step >= 3:
        # All tokens as deep as the last one that top-k keeps were counted.
        limit = tl.load(state + _LIMIT).to(tl.int32)
        total -= tl.load(state + _DROPPED) * mass_of(0.0 - limit.to(tl.float32, bitcast=True))
        goal = tl.load(top_p + row).to(tl.float64) * total.to(tl.float64)
    return goal


@triton.jit
def _keep_ties(step, limit, before, weight, goal, state):
    """How many of the tokens at the depth found stay: the smallest number that reaches the goal."""
    each = tl.full([], 1, tl.int64)
    if step >= 3:
        each = tl.maximum(mass_of(0.0 - limit.to(tl.int32).to(tl.float32, bitcast=True)), 1)
    ties = weight // each
    kept = ((goal - before.to(tl.float64)) / each.to(tl.float64)).to(tl.int64)
    kept = tl.minimum(tl.maximum(kept, 1), ties)
    # The quotient is a step or so off at most; the comparisons are the twin's.
    while (kept < ties) & ((before + kept * each).to(tl.float64) < goal):
        kept += 1
    while (kept > 1) & ((before + (kept - 1) * each).to(tl.float64) >= goal):
        kept -= 1
    tl.store(state + _LIMIT, limit)
    tl.store(state + _KEPT, kept)
    tl.store(state + _DROPPED, ties - kept)
