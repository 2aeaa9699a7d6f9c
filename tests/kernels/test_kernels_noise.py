"""Noise: known bits, uniformity over every argument, independence of rows and of the batch."""

import numpy as np
import pytest
import torch

from headrace.kernels.noise import derive_seed, gumbel_noise, noise_bits

INT64 = 2**63


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def unsigned(bits: torch.Tensor) -> np.ndarray:
    return bits.numpy().astype(np.uint32)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which chi-square lies above its mean (normal approximation)."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def bits_on_unsigned(seed: int, position: int, tokens: np.ndarray, stream: int) -> np.ndarray:
    """The same hash written on Python integers and numpy uint32, with plain shifts."""
    word = 2**64 - 1
    golden = 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    key = mix((seed + golden) & word)
    key = mix(key ^ (position & word))
    key = mix((key + golden * (2 * stream + 1)) & word)
    x = tokens.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x ^= np.uint32(key >> 32)
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


@pytest.mark.parametrize("seed", [0, 1, -1, 42, INT64 - 1, -INT64])
@pytest.mark.parametrize(("position", "stream"), [(0, 0), (7, 0), (123456, 3)])
def test_bits_are_those_of_unsigned_arithmetic(seed: int, position: int, stream: int) -> None:
    tokens = np.array([0, 1, 2, 49151, 262143, 2**31 - 1])
    got = noise_bits(column(seed), column(position), torch.from_numpy(tokens), stream)
    assert np.array_equal(unsigned(got)[0], bits_on_unsigned(seed, position, tokens, stream))


def test_noise_is_the_gumbel_of_the_upper_23_bits() -> None:
    seed, position = column(5), column(9)
    bits = unsigned(noise_bits(seed, position, 1000, 0)).astype(np.float64)
    uniform = (np.floor(bits / 512) + 0.5) / 2**23
    expected = -np.log(-np.log(uniform))
    got = gumbel_noise(seed, position, 1000).numpy()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_extreme_bits_stay_finite() -> None:
    """The largest and the smallest uniform: neither 0 nor 1 in float32."""
    positions = torch.arange(256, dtype=torch.int64)
    noise = gumbel_noise(torch.zeros(256, dtype=torch.int64), positions, 65536)  # 2**24 draws
    assert bool(noise.isfinite().all())
    assert -2.82 < float(noise.min()) < -2.7
    assert 14.0 < float(noise.max()) < 16.7


def uniform_axis(axis: str, count: int) -> np.ndarray:
    """Bits along one argument while the others rest."""
    moving = torch.arange(count, dtype=torch.int64)
    rest = torch.full_like(moving, 11)
    if axis == "token":
        return unsigned(noise_bits(column(11), column(11), count, 0))[0]
    if axis == "position":
        return unsigned(noise_bits(rest, moving, column(11), 0))[:, 0]
    if axis == "seed":
        return unsigned(noise_bits(moving, rest, column(11), 0))[:, 0]
    streams = [noise_bits(column(11), column(11), column(11), stream) for stream in range(count)]
    return unsigned(torch.cat(streams))[:, 0]


@pytest.mark.parametrize(
    ("axis", "count"), [("token", 262144), ("position", 262144), ("seed", 262144), ("stream", 4096)]
)
def test_bits_are_uniform_along_every_argument(axis: str, count: int) -> None:
    bits = uniform_axis(axis, count)
    for shift in (24, 12, 0):  # high, middle and low byte
        counts = np.bincount((bits >> np.uint32(shift)) & np.uint32(255), minlength=256)
        assert abs(chi_square(counts, np.full(256, count / 256))) < 5
    pairs = np.bincount(
        (bits[:-1] >> np.uint32(28)) * np.uint32(16) + (bits[1:] >> np.uint32(28)), minlength=256
    )
    assert abs(chi_square(pairs, np.full(256, (count - 1) / 256))) < 5


@pytest.mark.parametrize("difference", [1, 2, 256, 2**31, 2**32, 2**62])
@pytest.mark.parametrize("axis", ["seed", "position"])
def test_neighbouring_rows_are_uncorrelated(axis: str, difference: int) -> None:
    count = 100_000
    here, there = column(1000), column(1000 + difference)
    if axis == "seed":
        first, second = gumbel_noise(here, here, count), gumbel_noise(there, here, count)
    else:
        first, second = gumbel_noise(here, here, count), gumbel_noise(here, there, count)
    correlation = float(np.corrcoef(first.numpy()[0], second.numpy()[0])[0, 1])
    assert abs(correlation) < 5 / count**0.5
    assert abs(float((first == second).float().mean())) < 1e-4


def test_a_flipped_input_bit_flips_half_of_the_output_bits() -> None:
    tokens = 2048
    base = noise_bits(column(77), column(5), tokens, 0)
    for bit in range(64):
        flipped_seed = 77 ^ (1 << bit) if bit < 63 else 77 - INT64
        other = noise_bits(column(flipped_seed), column(5), tokens, 0)
        changed = np.unpackbits((unsigned(base) ^ unsigned(other)).view(np.uint8)).mean()
        assert abs(changed - 0.5) < 0.02, f"seed bit {bit}"
    for bit in range(18):
        other = noise_bits(column(77), column(5), torch.arange(tokens) ^ (1 << bit), 0)
        changed = np.unpackbits((unsigned(base) ^ unsigned(other)).view(np.uint8)).mean()
        assert abs(changed - 0.5) < 0.02, f"token bit {bit}"


def test_a_row_is_the_same_alone_in_a_batch_and_by_token_ids() -> None:
    seeds, positions = column(1, -7, 3, 1), column(4, 5, 6, 4)
    batch = gumbel_noise(seeds, positions, 1003)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1003)
        assert torch.equal(batch[row], alone[0])
    assert torch.equal(batch[0], batch[3])
    assert not torch.equal(batch[0], batch[1])
    ids = torch.tensor([[1002, 0, 5], [9, 9, 1], [3, 2, 1], [0, 1, 2]])
    assert torch.equal(gumbel_noise(seeds, positions, ids), batch.gather(1, ids))
    some = torch.tensor([7, 8, 900])
    assert torch.equal(gumbel_noise(seeds, positions, some), batch[:, some])
    assert not torch.equal(gumbel_noise(seeds, positions, 1003, stream=1), batch)


def test_derived_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    seeds = {derive_seed(seed, index) for seed in (-1, 0, 1, 2) for index in range(1024)}
    assert len(seeds) == 4 * 1024
    assert all(-INT64 <= seed < INT64 for seed in seeds)
    assert derive_seed(-INT64, 0) == -INT64
    assert derive_seed(42, 1) == derive_seed(42, 1)


def test_derived_seeds_are_not_noise_of_a_neighbouring_seed() -> None:
    """n sequences of seed s and of s + 1 share nothing."""
    first = column(*(derive_seed(42, index) for index in range(4)))
    second = column(*(derive_seed(43, index) for index in range(4)))
    at = torch.zeros(4, dtype=torch.int64)
    noise = torch.cat([gumbel_noise(first, at, 20_000), gumbel_noise(second, at, 20_000)]).numpy()
    correlation = np.corrcoef(noise) - np.eye(8)
    assert np.abs(correlation).max() < 5 / 20_000**0.5
