"""What the sampling kernels share: noise, changed logits, order keys, masses, a row's search state.

Each function is the twin's formula in the twin's order of roundings (`noise`, `ordering`, `mass`,
`filters`, and penalties and bias of the sampler): kernels that use them are compiled without fused
multiply-add, divide by `div_rn` and take the exact logarithm and exponential, so that on one device
they give the bits that torch gives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl
from triton.language.extra import libdevice

from headrace.kernels import mass, noise

# The interpreter has no libdevice; numpy's functions are exact to the last place or so.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_GOLDEN = tl.constexpr(noise.GOLDEN)
_STREAM_WORD = tl.constexpr(noise.GOLDEN * (2 * noise.SAMPLING_STREAM + 1) & ((1 << 64) - 1))
_MIX64 = tl.constexpr(noise.MIX64)
_MIX64_LAST = tl.constexpr(noise.MIX64_LAST)
_MIX32 = tl.constexpr(noise.MIX32)
_MIX32_LAST = tl.constexpr(noise.MIX32_LAST)
_UNIT = tl.constexpr(2.0**-23)
# Above the error of the fast logarithm on numbers from 2**-24 to 1, and that of the exact noise.
_BOUND_SLACK = tl.constexpr(1e-4)

_MASS_UNIT = tl.constexpr(float(1 << mass.MASS_BITS))

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_ALL_23 = tl.constexpr(0x7FFFFF)
_LOW_WORD = tl.constexpr(0xFFFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # bits of infinity
SPOILED = tl.constexpr((1 << 63) - 1)  # beats every order key: the row held NaN or +inf
MADE = tl.constexpr((1 << 30) - 1)  # bits of `token_counts` that count; bit 30: in the prompt


@triton.jit
def exact_log(x):
    return tl.log(x) if _INTERPRETED else libdevice.log(x)


@triton.jit
def exact_exp(x):
    return tl.exp(x) if _INTERPRETED else libdevice.exp(x)


@triton.jit
def _fast_log2(x):
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def _mix64(word):
    word = (word ^ (word >> _MIX64[0][0])) * _MIX64[0][1]
    word = (word ^ (word >> _MIX64[1][0])) * _MIX64[1][1]
    return word ^ (word >> _MIX64_LAST)


@triton.jit
def noise_key(seed, position):
    """Key of a row's noise: uint64, from its seed and position, int64."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    key = _mix64(key ^ position.to(tl.uint64, bitcast=True))
    return _mix64(key + _STREAM_WORD)


@triton.jit
def noise_bits(key, ids):
    """The 23 upper of the 32 random bits of token `ids` (int32), as int32."""
    bits = ids.to(tl.uint32, bitcast=True) ^ (key & _LOW_WORD).to(tl.uint32)
    bits = (bits ^ (bits >> _MIX32[0][0])) * _MIX32[0][1]
    bits = bits ^ (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> _MIX32[1][0])) * _MIX32[1][1]
    bits = (bits ^ (bits >> _MIX32[2][0])) * _MIX32[2][1]
    bits = bits ^ (bits >> _MIX32_LAST)
    return (bits >> 9).to(tl.int32)


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise of `noise_bits`, as `noise.gumbel_noise`."""
    uniform = (bits.to(tl.float32) + 0.5) * _UNIT
    return 0.0 - exact_log(0.0 - exact_log(uniform))


@triton.jit
def gumbel_bound(bits):
    """A cheap upper bound of `gumbel`, close where the noise is large.

    -log(u) >= 1 - u, so -log(-log(u)) <= -log(1 - u); and 1 - u is exact.
    """
    rest = (bits ^ _ALL_23).to(tl.float32) + 0.5
    return _fast_log2(rest * _UNIT) * -0.6931471805599453 + _BOUND_SLACK


@triton.jit
def order_key(value, token):
    """`ordering.order_keys` of one token."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(tl.int64) << 32) - token


@triton.jit
def key_token(key):
    return (0 - key) & _LOW_WORD


@triton.jit
def key_value(key):
    ordered = ((key + key_token(key)) >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def warped(x, peak, temperature):
    """Logits as the filters see them: at most 0."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def depth(below):
    """Bits of how far `warped` logits lie below the peak: an int32 that grows down the order."""
    return below.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def mass_of(below):
    """`mass.token_mass` of `warped` logits, int64."""
    return (exact_exp(below) * _MASS_UNIT).to(tl.int64)


@triton.jit
def changed(
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
    VOCABULARY: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    """Logits of one tile after penalties, bias and the stop ids before `min_tokens`.

    The three flags of the row come loaded, so that a loop over tiles does not ask again.
    """
    x = raw
    if is_penalised:
        counts = tl.load(token_counts + row * VOCABULARY + ids, mask=inside, other=0)
        made = counts & MADE
        factor = tl.load(repetition + row)
        x = tl.where(counts != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        x = x - made.to(tl.float32) * tl.load(frequency + row)
        x = x - (made > 0).to(tl.float32) * tl.load(presence + row)
    if is_biased:
        x = x + tl.load(bias + row * VOCABULARY + ids, mask=inside, other=0.0)
    if is_early:
        place = 0
        stop = tl.load(stop_ids + row * STOP_IDS)
        while stop >= 0:
            x = tl.where(ids == stop, float("-inf"), x)
            place += 1
            stop = tl.load(stop_ids + row * STOP_IDS + place, mask=place < STOP_IDS, other=-1)
    return x


@triton.jit
def last_to_arrive(arrived, AXIS: tl.constexpr = 0):
    """Counts this program; True in the last one of the row, which sees what the others wrote.

    The programs of a row lie along AXIS of the grid.
    """
    tl.debug_barrier()  # the writes of all threads come before the count of one
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(AXIS) - 1
    if last:
        tl.store(arrived, 0)
    return last
