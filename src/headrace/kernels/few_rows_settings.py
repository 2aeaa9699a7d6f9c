"""Settings of `few_rows`: measured ones, a rule for the rest, else cuBLAS.

A table in place of autotuning, as in `matvec_settings`.
"""

from dataclasses import dataclass

import torch

from headrace.kernels.device_sizes import (
    H200_MULTIPROCESSORS,
    H200_SHARED,
    takes_measured_settings,
)

MAX_ROWS = 128
"""Rows of x up to which reading the weights is the cost of a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowsSettings:
    """How a product of few rows is cut over programs, and when these may start.

    Attributes:
        weights: weight rows of a program.
        block: columns it reads at a time.
        warps: of a program.
        stages: blocks in flight, and one.
        splits: parts of the columns, each a program's of its own, whose sums the next kernel adds.
        descriptor: tiles by tensor descriptors (TMA) where the rows of the weights are aligned.
        prefetch: columns asked for while waiting for the kernel in front.
        dependent_launch: where the caller allows it, start before that one has ended.
    """

    weights: int
    block: int
    warps: int
    stages: int
    splits: int = 1
    descriptor: bool = True
    prefetch: int = 0
    dependent_launch: bool = True

    def __post_init__(self) -> None:
        assert self.dependent_launch or not self.prefetch, "nothing to wait for"


def _cut(
    weights: int,
    block: int,
    stages: int,
    splits: int = 1,
    *,
    prefetch: int = 0,
    descriptor: bool = True,
    dependent_launch: bool = True,
    warps: int = 4,
) -> FewRowsSettings:
    return FewRowsSettings(
        weights=weights,
        block=block,
        warps=warps,
        stages=stages,
        splits=splits,
        descriptor=descriptor,
        prefetch=prefetch,
        dependent_launch=dependent_launch,
    )


# (N, K) of the weights -> rows of x, up to which -> settings, or None for cuBLAS. One H200,
# bfloat16, torch 2.11, Triton 3.6, 2026-11-29, product and its reader: docs/performance.md. Swept
# with 8, 32 and 128 rows; 33 to 64 rows take the last, which in whole blocks still gains there.
MEASURED: dict[tuple[int, int], dict[int, FewRowsSettings | None]] = {
    # Qwen3-8B; its o and qkv are those of Llama-3.1-8B too
    (6144, 4096): {
        16: _cut(64, 128, 3, 4, prefetch=128),
        32: _cut(64, 256, 4, prefetch=128),
        128: None,
    },
    (4096, 4096): {
        16: _cut(64, 256, 5, 2, prefetch=128),
        32: _cut(64, 256, 4, 2, prefetch=128),
        128: _cut(64, 64, 8, 2, prefetch=512, descriptor=False),
    },
    (24576, 4096): {
        16: _cut(128, 128, 2, 2, dependent_launch=False),
        # of 17 to 32 rows ours was 1 % faster alone and 3 % slower in the chain of blocks
        128: None,
    },
    (4096, 12288): {
        16: _cut(64, 256, 5, 2, prefetch=128),
        32: _cut(64, 256, 4, 2, prefetch=512, descriptor=False),
        128: _cut(64, 64, 8, 2, prefetch=512, descriptor=False),
    },
    (151936, 4096): {16: _cut(128, 128, 2), 32: _cut(128, 64, 3), 128: None},
    # Qwen3-0.6B
    (4096, 1024): {
        16: _cut(128, 128, 3, 4, prefetch=128, descriptor=False),
        32: _cut(64, 256, 3, 2, prefetch=128),
        128: None,
    },
    (1024, 2048): {
        16: _cut(64, 256, 3, 2, prefetch=512),
        32: _cut(64, 256, 3, 4, prefetch=512),
        128: _cut(64, 64, 5, 4, prefetch=512),
    },
    (6144, 1024): {
        16: _cut(64, 128, 5, 2, prefetch=256, descriptor=False),
        32: _cut(128, 128, 5, prefetch=256, descriptor=False),
        128: None,
    },
    (1024, 3072): {
        16: _cut(64, 256, 3, 6, prefetch=512, descriptor=False),
        32: _cut(64, 256, 3, 6, prefetch=128),
        128: _cut(64, 64, 7, 4, prefetch=512),
    },
    (151936, 1024): {
        16: _cut(128, 128, 2),
        32: _cut(64, 128, 3),
        128: _cut(128, 64, 7, prefetch=256, descriptor=False, warps=8),
    },
    # Llama-3.1-8B; swept with 32 and 128 rows
    (28672, 4096): {
        32: _cut(128, 128, 5, prefetch=256),
        128: _cut(128, 64, 3, dependent_launch=False),
    },
    (4096, 14336): {
        32: _cut(64, 256, 4, 2, prefetch=128),
        128: _cut(64, 64, 8, 2, prefetch=512, descriptor=False),
    },
}


MAX_STAGES = 8
LEAST_INPUTS = 512  # half of the shortest rows that were measured
HEAD = 1 << 16  # outputs, above which no gate and up lie


def few_rows_settings(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> FewRowsSettings | None:
    """For x [rows, inputs] and weights [outputs, inputs]; `None` where cuBLAS is faster, or nothing
    is known of the device."""
    if not takes_measured_settings(device):
        return None
    measured = MEASURED.get((outputs, inputs))
    if measured is None:
        return _by_rule(rows, outputs, inputs)
    for limit, settings in sorted(measured.items()):
        if rows <= limit:
            return settings
    return None


def _by_rule(rows: int, outputs: int, inputs: int) -> FewRowsSettings | None:
    """For shapes that were not measured: what is never far from the best of those that were.

    Fitted to the sweep of the shapes above: with 8 and 32 rows within 7 % of the best, but 11 % for
    0.6B gate up with 32; with 128 rows as good as the best. `None` where cuBLAS won or drew: gate
    and up of more than 16 rows; of more than 32 all but narrow products, and of those the ones with
    more outputs than inputs. Rows of weights that are not aligned were not measured.
    """
    if rows > MAX_ROWS or inputs < LEAST_INPUTS or inputs % 8:
        return None
    narrow = 2 * outputs <= 64 * H200_MULTIPROCESSORS  # two programs at least for each tile
    if rows <= 32 and narrow:
        return _spread(rows, outputs, inputs, 64, 256, least=512, prefetch=128)
    if rows <= 32 and outputs <= 64 * H200_MULTIPROCESSORS:
        return _spread(rows, outputs, inputs, 128, 128, least=1024, prefetch=256)
    if rows <= 16:
        return _spread(rows, outputs, inputs, 128, 128, programs=3, least=1024, prefetch=64)
    if rows <= 32 and outputs > HEAD:
        return _spread(rows, outputs, inputs, 64, 128, programs=3, least=1024, prefetch=128)
    if rows > 32 and narrow and outputs <= inputs:
        return _spread(rows, outputs, inputs, 64, 64, least=512, prefetch=512, descriptor=False)
    return None


def _spread(
    rows: int,
    outputs: int,
    inputs: int,
    weights: int,
    block: int,
    *,
    least: int,
    prefetch: int,
    programs: int = 1,
    descriptor: bool = True,
) -> FewRowsSettings:
    """Splits of at least `least` columns for up to `programs` at once on a multiprocessor, and the
    stages that fill its shared memory."""
    tiles = -(-outputs // weights)
    splits = max(1, min(programs * H200_MULTIPROCESSORS // tiles, inputs // least))
    tokens = 16 if rows <= 16 else 1 << (rows - 1).bit_length()
    held = H200_SHARED // programs // ((weights + tokens) * block * 2)
    stages = min(MAX_STAGES, held, -(-inputs // block) // splits + 1)
    return _cut(weights, block, stages, splits, prefetch=prefetch, descriptor=descriptor)
