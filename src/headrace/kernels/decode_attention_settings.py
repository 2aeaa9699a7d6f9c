"""Settings of decode attention: two, measured, for few programs and for many."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """What a program of the decode kernel takes at once; decides the order of additions.

    Attributes:
        block_bytes: of K and V per pipeline stage.
        warps, stages: of the program.
        early: blocks asked for before the wait, where the tables are ready.
    """

    block_bytes: int
    warps: int
    stages: int
    early: int


# Few programs must each keep much in flight; many do that together, and want the shared memory.
# Measured on an H200, bfloat16, 32 query and 8 KV heads of 128, context 1,056, us a layer, deep and
# shallow: 32 rows 35.8 and 42.3, 64 rows 68.8 and 66.7, 128 rows 132.7 and 128.6, 256 rows 255.7
# and 249.6 (Triton 3.6, 2026-11-29).
DEEP = DecodeSettings(block_bytes=32 * 1024, warps=4, stages=4, early=2)
SHALLOW = DecodeSettings(block_bytes=32 * 1024, warps=4, stages=2, early=0)
DEEP_UP_TO = 3  # programs a multiprocessor


def decode_settings(*, batch: int, kv_heads: int, multiprocessors: int) -> DecodeSettings:
    """Those of a batch: a pure function of host numbers."""
    few = batch * kv_heads <= DEEP_UP_TO * multiprocessors
    return DEEP if few else SHALLOW
