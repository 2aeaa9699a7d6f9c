"""Log-probabilities and ranks in Triton, for some rows of a step's logits, in two launches.

The first reads each row once, in tiles: the largest order key of every tile, and how many keys lie
before each token that is asked. With the largest keys of all tiles the second knows the peak, so it
adds up masses as the twin does, and which tiles can hold one of the top n: a tile with n or more
larger ones above it cannot, nor can a token with n known ones before it. The last program of a row
puts the top list in order and writes everything. Rows that do not ask are not read.

Meaning: `logprobs.token_logprobs`. Masses are the same whole numbers and ranks the same counts, in
any order of the additions, so a row does not depend on its batch-mates.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.kernels.fused_math_triton import (
    begin,
    check_fused,
    launch_options,
    next_power,
    wait,
)
from headrace.kernels.kept_launches_triton import KeptLaunches, aligned
from headrace.kernels.logprobs import LogprobTensors
from headrace.kernels.mass import MASS_BITS, MAX_VOCABULARY
from headrace.kernels.one_storage import one_storage
from headrace.kernels.sampling_math_triton import (
    exact_log,
    key_token,
    key_value,
    last_to_arrive,
    mass_of,
    order_key,
)

MAX_TOP = 32
MAX_ASKED = 32  # tokens of a row whose rank is wanted, the chosen one among them
TILE = 2048
_MAX_TILES = MAX_VOCABULARY // TILE
_WARPS = 4
_TOP = tl.constexpr(MAX_TOP)
_ASKED = tl.constexpr(MAX_ASKED)
_TILES = tl.constexpr(_MAX_TILES)
_UNIT = tl.constexpr(2.0**-MASS_BITS)
_LOWEST = tl.constexpr(-(1 << 63))  # below the key of every token


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobScratch:
    """Where the programs of a row meet; every call leaves its counts at 0. 12 KiB a row.

    best [L, 512], found [L, 32 * 32], mass [L] int64; before [L, 32], arrived [L] int32. Calls that
    may run at the same time need scratch of their own.
    """

    best: Tensor
    found: Tensor
    mass: Tensor
    before: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> "LogprobScratch":
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        return cls(
            best=zeros(torch.int64, _MAX_TILES),
            found=zeros(torch.int64, MAX_TOP * MAX_TOP),
            mass=zeros(torch.int64),
            before=zeros(torch.int32, MAX_ASKED),
            arrived=zeros(torch.int32),
        )


def kernel_takes(top: int, named: int, vocabulary: int) -> bool:
    """Whether `token_logprobs` here takes so many likeliest tokens and named ones of a row.

    Longer lists are a matter of sorting, which the torch twin does.
    """
    return top <= MAX_TOP and named < MAX_ASKED and vocabulary <= MAX_VOCABULARY


def token_logprobs(
    logits: Tensor,
    chosen: Tensor,
    top: int,
    token_ids: Tensor | None = None,
    *,
    index: Tensor,
    scratch: LogprobScratch,
    pdl: bool = False,
) -> LogprobTensors:
    """As the twin, for the rows `index` of the logits; the results lie in one storage.

    A row with NaN gets NaN values. Numbers of a row with +inf mean nothing; it has failed.

    Args:
        logits: [S, V] float32, last dimension without gaps; not written.
        chosen: [S] int64.
        top: see `kernel_takes`.
        token_ids: [L, M] int64 contiguous, padded with -1.
        index: [L] int64, rows that ask.
        scratch: for at least L rows.
        pdl: programmatic dependent launch, of the second kernel upon the first.

    Returns: as the twin, of L rows.

    Raises:
        UnsupportedError: device or dtype the kernels do not take, or more than `kernel_takes`.
    """
    check_fused("logprobs", logits, pdl=pdl)
    rows, vocabulary = index.shape[0], logits.shape[1]
    top = min(top, vocabulary)
    named = 0 if token_ids is None else token_ids.shape[1]
    if logits.dtype != torch.float32 or not kernel_takes(top, named, vocabulary):
        raise UnsupportedError(
            f"logprobs by Triton got a top {top}, {named} named tokens of {vocabulary}, "
            f"{logits.dtype}",
            why=f"they take float32, a top {MAX_TOP}, and {MAX_ASKED - 1} named tokens",
            remedy="take token_logprobs of the torch twin",
        )
    assert logits.stride(1) == 1
    assert scratch.best.shape[0] >= rows
    width = 1 + named + top
    ids, values = one_storage(
        logits.device, (torch.int64, (rows, width)), (torch.float32, (rows, width))
    )
    names = index if token_ids is None else token_ids  # not read where there are none
    assert names.is_contiguous()
    count, make_list = _launches(logits.device, vocabulary, logits.stride(0), pdl)
    sources = (logits, chosen, index, names, named)
    meeting = (scratch.best, scratch.before)
    if rows > 0:
        grid = (triton.cdiv(vocabulary, TILE), rows, 1)
        count(aligned(logits), grid, *sources, *meeting)
        own = (scratch.found, scratch.mass, scratch.arrived)
        make_list(aligned(logits), grid, *sources, top, *meeting, *own, values, ids)
    parts = (1, named, top)
    value, named_value, top_value = values.split_with_sizes(parts, 1)
    rank, named_rank, top_id = ids.split_with_sizes(parts, 1)
    if token_ids is None:
        return value[:, 0], rank[:, 0], top_value, top_id, None, None
    return value[:, 0], rank[:, 0], top_value, top_id, named_value, named_rank


@functools.cache
def _launches(
    device: torch.device, vocabulary: int, stride: int, pdl: bool
) -> tuple[KeptLaunches, KeptLaunches]:
    """The two kernels: they differ by nothing else but the alignment of the logits."""
    tiles = triton.cdiv(vocabulary, TILE)
    constants = {
        "VOCABULARY": vocabulary,
        "STRIDE": stride,
        "TILES": tiles,
        "TILE": TILE,
        "PDL": pdl,
    }
    # The twin rounds products and sums apart.
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    # Nothing is known of what runs in front, so the first waits for all of it as usual.
    count = KeptLaunches(_count_kernel, constants, **options)
    padded = {"TILES_PAD": next_power(tiles), **constants}
    return count, KeptLaunches(_list_kernel, padded, **options, **launch_options(pdl))


@triton.jit
def _load(logits, ids, VOCABULARY: tl.constexpr):
    """Logits; every NaN the positive one, which comes first in the order."""
    x = tl.load(logits + ids, mask=ids < VOCABULARY, other=float("-inf"))
    return tl.where(x == x, x, float("nan"))


@triton.jit
def _keys(x, ids, VOCABULARY: tl.constexpr):
    return tl.where(ids < VOCABULARY, order_key(x, ids), _LOWEST)


@triton.jit
def _asked(place, chosen, row, names, line, named):
    """Token `place` of those whose rank is wanted: the chosen one, then the named ones."""
    if place == 0:
        token = tl.load(chosen + row)
    else:
        token = tl.maximum(tl.load(names + line * named + place - 1), 0)
    return token


@triton.jit(
    do_not_specialize=["named"],
    do_not_specialize_on_alignment=["chosen", "index", "names", "best", "before"],
)
def _count_kernel(
    logits,
    chosen,
    index,
    names,
    named,
    best,
    before,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of one row."""
    begin(PDL)
    wait(PDL)
    tile, line = tl.program_id(0), tl.program_id(1)
    row = tl.load(index + line)
    logits += row * STRIDE
    ids = tile * TILE + tl.arange(0, TILE)
    keys = _keys(_load(logits, ids, VOCABULARY), ids, VOCABULARY)
    tl.store(best + line * _TILES + tile, tl.max(keys, 0))
    for place in range(named + 1):
        token = _asked(place, chosen, row, names, line, named)
        own = order_key(_load(logits, token, VOCABULARY), token)
        larger = tl.sum((keys > own).to(tl.int32), 0)
        if larger > 0:
            tl.atomic_add(before + line * _ASKED + place, larger, sem="relaxed")


@triton.jit(
    do_not_specialize=["named", "top"],
    do_not_specialize_on_alignment=[
        *("chosen", "index", "names", "best", "before", "found", "mass", "arrived"),
        *("values", "ids_out"),
    ],
)
def _list_kernel(
    logits,
    chosen,
    index,
    names,
    named,
    top,
    best,
    before,
    found,
    mass,
    arrived,
    values,
    ids_out,
    TILES_PAD: tl.constexpr,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of one row. The last of a row writes its results."""
    begin(PDL)
    wait(PDL)
    tile, line = tl.program_id(0), tl.program_id(1)
    row = tl.load(index + line)
    logits += row * STRIDE
    ids = tile * TILE + tl.arange(0, TILE)
    x = _load(logits, ids, VOCABULARY)
    column = tl.arange(0, TILES_PAD)
    tops = tl.load(best + line * _TILES + column, mask=column < TILES, other=_LOWEST)
    peak = key_value(tl.max(tops, 0))
    tl.atomic_add(mass + line, tl.sum(mass_of(x - peak), 0), sem="relaxed")
    _list_tile(_keys(x, ids, VOCABULARY), tops, top, found + line * _TOP * _TOP)
    if last_to_arrive(arrived + line):
        total = tl.load(mass + line, cache_modifier=".cg")
        normaliser = exact_log(total.to(tl.float64) * _UNIT)
        highest = peak.to(tl.float64)
        out = line * (named + 1 + top)
        for each in range(named + 1):
            token = _asked(each, chosen, row, names, line, named)
            value = _load(logits, token, VOCABULARY).to(tl.float64) - highest
            tl.store(values + out + each, (value - normaliser).to(tl.float32))
            larger = tl.load(before + line * _ASKED + each)
            tl.store(ids_out + out + each, 1 + larger.to(tl.int64))
        keys = _merged(found + line * _TOP * _TOP, top, TILES)
        place = tl.arange(0, _TOP)
        list_value = key_value(keys).to(tl.float64) - highest
        out += named + 1
        tl.store(values + out + place, (list_value - normaliser).to(tl.float32), mask=place < top)
        tl.store(ids_out + out + place, key_token(keys), mask=place < top)
        tl.debug_barrier()  # all threads have read what now goes back to 0
        tl.store(mass + line, 0)
        tl.store(before + line * _ASKED + tl.arange(0, _ASKED), tl.zeros([_ASKED], tl.int32))


@triton.jit
def _list_tile(keys, tops, top, found):
    """Writes the keys of a tile that can be among the first `top` of the row, the rest lowest.

    The tile's line is the number of tiles with a larger best key, so there are `top` lines at most.
    """
    key = tl.max(keys, 0)
    above = tl.sum((tops > key).to(tl.int32), 0)
    line, place = above, 0
    column = tl.arange(0, _TOP)
    listed = tl.full([_TOP], _LOWEST, tl.int64)
    # Before `key` come the best keys of other tiles above it, and those that this tile listed.
    while (place < top) & (above + place < top) & (key != _LOWEST):
        listed = tl.where(column == place, key, listed)
        keys = tl.where(keys == key, _LOWEST, keys)
        key = tl.max(keys, 0)
        place += 1
        above = tl.sum((tops > key).to(tl.int32), 0) - 1  # the tile's own is counted in `place`
    if line < top:
        tl.store(found + line * _TOP + column, listed)


@triton.jit
def _merged(found, top, TILES: tl.constexpr):
    """The first `top` of the keys that tiles listed, in order."""
    place = tl.arange(0, _TOP * _TOP)
    there = place // _TOP < tl.minimum(top, TILES)
    keys = tl.load(found + place, mask=there, other=_LOWEST, cache_modifier=".cg")
    column = tl.arange(0, _TOP)
    merged = tl.full([_TOP], _LOWEST, tl.int64)
    for each in range(top):
        key = tl.max(keys, 0)
        merged = tl.where(column == each, key, merged)
        keys = tl.where(keys == key, _LOWEST, keys)
    return merged
