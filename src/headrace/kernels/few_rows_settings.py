"""Shapes of the programs of `few_rows`: measured ones, a rule for the rest, else cuBLAS.

A table in place of autotuning, as in `matvec_settings`.
"""

from dataclasses import dataclass

import torch

MAX_ROWS = 128
"""Rows of x up to which reading the weights is the cost of a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowsSettings:
    """How a product of few rows is cut over programs.

    weights: weight rows of a program; block: columns it reads at a time; stages: blocks in flight,
    and one; splits: parts of the columns, each a program's of its own, whose sums the next kernel
    adds; descriptor: tiles by tensor descriptors (TMA) where the rows of the weights are aligned;
    prefetch: columns asked for while waiting for the kernel in front; dependent_launch: where the
    caller allows it, start before that one has ended.
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


CAPABILITY = (9, 0)
"""Of the GPUs that table and rule are for: others have less shared memory, or other
instructions."""

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
        32: _cut(128, 64, 3, prefetch=64, descriptor=False),
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


def few_rows_settings(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> FewRowsSettings | None:
    """For x [rows, inputs] and weights [outputs, inputs]; `None` where cuBLAS is faster, or nothing
    is known of the device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != CAPABILITY:
        return None
    for limit, settings in sorted(MEASURED.get((outputs, inputs), {}).items()):
        if rows <= limit:
            return settings
    return None
