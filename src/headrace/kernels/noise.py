"""Noise of sampling as a pure function of seed, position, token id and stream.

A counter in place of a generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): no state to keep, so a row draws the same whatever its batch, order or path. Adding Gumbel
noise to logits and taking the arg-max draws from their softmax.

Integers wrap around at 32 or 64 bits. torch's right shift keeps the sign, so every shift is
followed by a mask; a kernel on unsigned numbers gives the same bits with plain shifts.
"""

import torch
from torch import Tensor

SAMPLING_STREAM = 0

GOLDEN = 0x9E3779B97F4A7C15
# Finaliser of SplitMix64 (Steele, Lea, Flood 2014), constants by David Stafford ("mix 13").
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
MIX64_LAST = 31
# Three-round 32-bit finaliser found by Chris Wellons' hash prospector ("triple32").
MIX32 = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
MIX32_LAST = 14
_WORD = (1 << 64) - 1


def gumbel_noise(
    seed: Tensor, position: Tensor, tokens: int | Tensor, stream: int = SAMPLING_STREAM
) -> Tensor:
    """Standard Gumbel noise [S, V] float32, between about -2.8 and 16.7.

    Args:
        seed, position: [S] int64.
        tokens: V, or token ids [V] or [S, V] of any integer type.
        stream: number of an independent use of the same seed and position, 0 to 2**31 - 1.
    """
    bits = noise_bits(seed, position, tokens, stream)
    # 23 bits and a half: exact in float32, so a uniform is never 0 and never rounds to 1.
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def noise_bits(seed: Tensor, position: Tensor, tokens: int | Tensor, stream: int) -> Tensor:
    """32 random bits as [S, V] int32. Arguments as for `gumbel_noise`."""
    key = _mix64(seed + _signed(GOLDEN, 64))
    key = _mix64(key ^ position)
    key = _mix64(key + _signed(GOLDEN * (2 * stream + 1), 64))
    low, high = _low_word(key)[:, None], _low_word(key >> 32)[:, None]  # [S, 1]
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=torch.int32, device=seed.device)
    # The second half of the key enters between rounds: with the first alone, rows whose halves
    # are close would see the same numbers at swapped tokens.
    first, *rest = MIX32
    bits = _round32(tokens.to(torch.int32) ^ low, *first).bitwise_xor_(high)  # [S, V]
    for shift, factor in rest:
        bits = _round32(bits, shift, factor)
    return bits.bitwise_xor_(_shift32(bits, MIX32_LAST))


def derive_seed(seed: int, sequence_index: int) -> int:
    """Seed of sequence `sequence_index` of a request: its own for index 0, a hash for the others.

    Args:
        seed: signed 64-bit.
        sequence_index: 0 to n - 1.

    Returns:
        A signed 64-bit number.
    """
    if sequence_index == 0:
        return seed
    word = _mix64_host(~seed & _WORD)
    return _signed(_mix64_host((word + sequence_index * GOLDEN) & _WORD), 64)


def _round32(bits: Tensor, shift: int, factor: int) -> Tensor:
    """One round of the finaliser; overwrites `bits`."""
    return bits.bitwise_xor_(_shift32(bits, shift)).mul_(_signed(factor, 32))


def _shift32(bits: Tensor, shift: int) -> Tensor:
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _mix64(word: Tensor) -> Tensor:
    for shift, factor in MIX64:
        word = (word ^ _shift64(word, shift)) * _signed(factor, 64)
    return word ^ _shift64(word, MIX64_LAST)


def _shift64(word: Tensor, shift: int) -> Tensor:
    return (word >> shift) & ((1 << (64 - shift)) - 1)


def _mix64_host(word: int) -> int:
    for shift, factor in MIX64:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> MIX64_LAST)


def _low_word(word: Tensor) -> Tensor:
    """The low 32 bits of int64 as int32, by value and not by an overflowing conversion."""
    return ((word << 32) >> 32).to(torch.int32)


def _signed(word: int, bits: int) -> int:
    """The signed number with the same low bits."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word
