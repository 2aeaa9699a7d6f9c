"""Settings of `invariant_product`: they decide its speed, and no bit of its result.

Of few rows the weights are the left operand of the instructions (`few_rows`, without splits), of
more rows x is: an instruction adds the same products in the same order either way.

Measured ones for some shapes, a rule for the rest, one tile where nothing is known of the device.
"""

from dataclasses import dataclass
from functools import cache

import torch

from headrace.kernels.device_sizes import (
    H200_MULTIPROCESSORS,
    H200_SHARED,
    takes_measured_settings,
)
from headrace.kernels.few_rows_settings import FewRowsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSettings:
    """The tile that a program multiplies.

    Attributes:
        tokens: rows of x, a multiple of 64: the rows of a warp group's instruction, always.
        weights: rows of the weights; of gate and up together where an activation is behind.
        block: columns at a time.
        warps: of a program.
        stages: blocks in flight, and one.
        group: tiles of tokens that go through the weights side by side, so that both stay in the
            L2.
        prefetch: columns of the weights asked for while waiting for the kernel in front.
        persistent: one program a multiprocessor takes tile after tile.
        descriptor: tiles by tensor descriptors (TMA) where rows are aligned.
    """

    tokens: int
    weights: int
    block: int
    warps: int
    stages: int
    group: int = 8
    prefetch: int = 0
    persistent: bool = False
    descriptor: bool = True

    @property
    def shared(self) -> int:
        """Bytes of the blocks in flight, in 16 bits a number."""
        return (self.tokens + self.weights) * self.block * 2 * self.stages


Settings = ProductSettings | FewRowsSettings


def _tile(
    tokens: int,
    weights: int,
    block: int,
    stages: int,
    warps: int = 4,
    *,
    prefetch: int = 0,
    persistent: bool = False,
) -> ProductSettings:
    return ProductSettings(
        tokens=tokens,
        weights=weights,
        block=block,
        stages=stages,
        warps=warps,
        prefetch=prefetch,
        persistent=persistent,
    )


def _left(weights: int, block: int, stages: int) -> FewRowsSettings:
    """The weights on the left, all columns of a row in one program."""
    return FewRowsSettings(weights=weights, block=block, warps=4, stages=stages, prefetch=256)


EXACT = ProductSettings(tokens=16, weights=32, block=32, warps=4, stages=2, descriptor=False)
"""Of float32, whose products are no tensor core's."""
ANYWHERE = ProductSettings(tokens=64, weights=64, block=64, warps=4, stages=3, descriptor=False)
"""Of GPUs whose instructions were not looked at: one tile has one order."""

# (rows of the weights, columns, gated) -> rows of x, up to which -> settings. Of more rows the
# rule's.
# Measured on an H200 in bfloat16, Triton 3.6, 2026-11.
MEASURED: dict[tuple[int, int, bool], dict[int, Settings]] = {
    (6144, 4096, False): {
        16: _left(64, 256, 5),
        32: _left(64, 256, 4),
        64: _tile(64, 64, 128, 6, prefetch=256),
        128: _tile(128, 64, 64, 9, 8, prefetch=128),
        256: _tile(128, 128, 64, 6, 8),
        1024: _tile(128, 256, 64, 4, 8),
    },
    (4096, 4096, False): {
        16: _left(64, 256, 5),
        32: _left(64, 256, 4),
        64: _tile(64, 32, 128, 8, prefetch=256),
        128: _tile(128, 32, 128, 5, prefetch=128),
        256: _tile(128, 64, 64, 6, 8),
        1024: _tile(128, 128, 64, 3, 8),
    },
    (24576, 4096, True): {
        32: _left(128, 128, 5),
        64: _tile(64, 128, 128, 4, prefetch=256),
        128: _tile(128, 256, 64, 4, 8, prefetch=128),
    },
    (4096, 12288, False): {
        16: _left(64, 256, 5),
        32: _left(64, 256, 4),
        64: _tile(64, 32, 128, 8, prefetch=256),
        128: _tile(128, 32, 128, 5, prefetch=128),
        256: _tile(128, 64, 64, 6, 8),
        1024: _tile(128, 256, 64, 4, 8, persistent=True),
    },
    (151936, 4096, False): {
        16: _left(128, 128, 5),
        32: _left(64, 128, 4),
        64: _left(128, 128, 4),
        128: _tile(128, 256, 64, 4, 8, prefetch=128),
        256: _tile(128, 256, 64, 4, 8),
    },
}

UP_TO = 1 << 10  # rows of x up to which each power of two has its own; all more have those of MANY
MANY = 1 << 13
# What a multiprocessor makes of the matrix rate by the weights of a tile of 128 rows of x.
EFFICIENCY = {256: 1.0, 128: 0.92, 64: 0.7, 32: 0.4}


def product_settings(
    rows: int, outputs: int, inputs: int, *, gated: bool, dtype: torch.dtype, device: torch.device
) -> Settings:
    """For x [rows, inputs] and weights [outputs, inputs]; the same for all rows between two powers
    of two, and for all above `UP_TO`."""
    if dtype is torch.float32:
        return EXACT
    if not takes_measured_settings(device):
        return ANYWHERE
    rows = 1 << max(4, (rows - 1).bit_length()) if rows <= UP_TO else MANY
    return settings_on_hopper(rows, outputs, inputs, gated)


@cache
def settings_on_hopper(rows: int, outputs: int, inputs: int, gated: bool) -> Settings:
    """`rows` is a power of two, 16 at least."""
    for limit, settings in sorted(MEASURED.get((outputs, inputs, gated), {}).items()):
        if rows <= limit:
            return settings
    if rows <= 32:
        return _fewest(rows, outputs, gated)
    return _few(rows, outputs, gated) if rows <= 128 else _many(rows, outputs)


def _fewest(rows: int, outputs: int, gated: bool) -> FewRowsSettings:
    """64 rows of weights are one instruction's (of gate and of up each); more of them where all
    multiprocessors have work."""
    wide = gated or outputs >= 128 * H200_MULTIPROCESSORS
    weights, block = (128, 128) if wide else (64, 256)
    return _left(weights, block, min(5, H200_SHARED // ((rows + weights) * block * 2)))


def _few(rows: int, outputs: int, gated: bool) -> ProductSettings:
    """Reading the weights is the cost: as wide as still keeps every multiprocessor reading."""
    least = 32 if gated or rows > 64 else 16
    widths = [width for width in (128, 64, 32) if outputs >= width * (H200_MULTIPROCESSORS - 4)]
    weights = widths[0] if widths else least
    programs = -(-outputs // weights)
    together = 1 if programs <= H200_MULTIPROCESSORS else 2
    block = 128 if rows + weights <= 128 else 64
    stages = min(9, H200_SHARED // together // ((rows + weights) * block * 2))
    return _tile(rows, weights, block, stages, 4 if rows == 64 else 8, prefetch=128)


def _many(rows: int, outputs: int) -> ProductSettings:
    """Multiplying is the cost: the width whose last wave of programs is the fullest, for what its
    programs make of the matrix rate."""

    def rate(weights: int) -> float:
        programs = rows // 128 * -(-outputs // weights)
        waves = -(-programs // H200_MULTIPROCESSORS)
        return EFFICIENCY[weights] * outputs * rows / (waves * weights)

    weights = max(EFFICIENCY, key=rate)
    stages = min(6, H200_SHARED // ((128 + weights) * 128))
    return _tile(128, weights, 64, stages, 8)
