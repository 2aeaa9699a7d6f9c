"""Settings of `matvec`: measured ones, and a rule for the rest.

A table in place of autotuning: nothing is compiled or timed at run time, so that a graph capture
meets no kernel that its warm-up did not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MatvecSettings:
    """How the weights of a product are cut over programs, and when these may start.

    Attributes:
        rows: weight rows of a program.
        block: columns it reads at a time.
        warps: of a program.
        dependent_launch: where the caller allows it, start before the kernel in front has ended.
        prefetch: ask for the whole rows while waiting for that end.
    """

    rows: int
    block: int
    warps: int
    dependent_launch: bool = True
    prefetch: bool = False

    def __post_init__(self) -> None:
        assert self.dependent_launch or not self.prefetch, "nothing to wait for"


# (N, K) of the weights -> settings; one H200, bfloat16, 2026-11-29: docs/performance.md.
MEASURED = {
    (6144, 4096): MatvecSettings(rows=4, block=1024, warps=4),
    (4096, 4096): MatvecSettings(rows=2, block=2048, warps=4),
    (24576, 4096): MatvecSettings(rows=2, block=2048, warps=4, dependent_launch=False),
    (4096, 12288): MatvecSettings(rows=4, block=1024, warps=4),
    (4096, 1024): MatvecSettings(rows=8, block=1024, warps=4, prefetch=True),
    (1024, 2048): MatvecSettings(rows=2, block=2048, warps=8),
    (6144, 1024): MatvecSettings(rows=8, block=1024, warps=4),
    (1024, 3072): MatvecSettings(rows=2, block=2048, warps=8),
    (151936, 4096): MatvecSettings(rows=2, block=2048, warps=4, dependent_launch=False),
}
LARGE = 1 << 26  # elements; above it lie the measured shapes that lose by dependent launch
FEW_OUTPUTS = 2048  # up to here more warps a program and fewer rows keep the device busy
SHORT = 1024  # inputs that one block covers


def matvec_settings(outputs: int, inputs: int) -> MatvecSettings:
    """For weights [outputs, inputs]: the measured settings, or those of the measured shapes of
    like size."""
    if measured := MEASURED.get((outputs, inputs)):
        return measured
    whole = max(128, 1 << (inputs - 1).bit_length())  # a block that covers a row
    if outputs * inputs >= LARGE:
        return MatvecSettings(rows=2, block=min(2048, whole), warps=4, dependent_launch=False)
    if outputs <= FEW_OUTPUTS:
        return MatvecSettings(rows=2, block=min(2048, whole), warps=8)
    rows = 8 if inputs <= SHORT else 4
    return MatvecSettings(rows=rows, block=min(1024, whole), warps=4)
