"""Shapes of the programs of `few_rows`: measured ones; where none is, cuBLAS multiplies.

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


CAPABILITY = (9, 0)
"""Of the GPUs that the table is for: others have less shared memory, or other instructions."""

# (N, K) of the weights -> rows of x, up to which -> settings, or None for cuBLAS.
MEASURED: dict[tuple[int, int], dict[int, FewRowsSettings | None]] = {}


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
