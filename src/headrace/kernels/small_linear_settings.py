"""Shapes of the programs of `small_linear`: measured ones, and a rule for the rest.

A table in place of autotuning: nothing is compiled or timed at run time, so that a graph capture
meets no kernel that its warm-up did not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MatvecSettings:
    """One row of x.

    rows: weight rows of a program; block: columns it reads at a time; prefetch: with programmatic
    dependent launch, ask for the whole rows before the kernel in front has ended.
    """

    rows: int
    block: int
    warps: int
    prefetch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinSettings:
    """2 to 16 rows of x, padded to 16.

    block: outputs of a program (with an activation it reads two weight rows each); depth: columns
    of a step of the loop; stages: steps in flight.
    """

    block: int
    depth: int
    warps: int
    stages: int
    prefetch: bool = False


# (N, K) -> settings; one H200, bf16, programmatic dependent launch, 2026-11-29.
MEASURED_MATVEC = {
    (6144, 4096): MatvecSettings(rows=2, block=2048, warps=8),
    (4096, 4096): MatvecSettings(rows=2, block=2048, warps=8),
    (24576, 4096): MatvecSettings(rows=2, block=2048, warps=4),
    (4096, 12288): MatvecSettings(rows=2, block=2048, warps=4),
    (6144, 1024): MatvecSettings(rows=4, block=1024, warps=4),
}
LARGE = 1 << 25  # elements from which the weights alone fill the device with few warps


def matvec_settings(outputs: int, inputs: int) -> MatvecSettings:
    """For weights [outputs, inputs]: about 8 KiB of bfloat16 a step, rows of 4 KiB at most."""
    if measured := MEASURED_MATVEC.get((outputs, inputs)):
        return measured
    block = min(2048, max(128, 1 << (inputs - 1).bit_length()))
    warps = 8 if block == 2048 and outputs * inputs < LARGE else 4
    return MatvecSettings(rows=min(16, 4096 // block), block=block, warps=warps)


def thin_settings(outputs: int, inputs: int, itemsize: int) -> ThinSettings:
    """For weights [outputs, inputs] of `itemsize` bytes: 16 rows a program fill the device.

    Not measured yet in finer classes than these.
    """
    depth = min(512 // itemsize, max(16, 1 << (inputs - 1).bit_length()))
    block = 16 if outputs <= 16384 else 32
    return ThinSettings(block=block, depth=depth, warps=4, stages=4)
