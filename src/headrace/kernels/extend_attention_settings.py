"""Settings of extend attention: measured ones, by what of a block's keys fits the device."""

from dataclasses import dataclass

from headrace.kernels.device_sizes import HOPPER_SHARED

WHOLE_BLOCK = 64  # keys that a descriptor brings at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSettings:
    """What a program of the extend kernel takes at once; decides the order of additions.

    Attributes:
        rows: heads of the group times queries.
        block_bytes: of K and V per pipeline stage.
        warps: of the program.
        stages: blocks in flight, the one at work included, where nothing is masked.
        by_block: a block comes whole, by the tensor memory accelerator, and not row by row.
    """

    rows: int
    block_bytes: int
    warps: int
    stages: int = 2
    by_block: bool = False


def extend_settings(
    *, row_bytes: int, element: int, shared_memory: int, by_block: bool = False
) -> ExtendSettings:
    """Those of a model on a device, whatever the batch.

    Measured on an H200 in bfloat16 (Triton 3.6, 2026-11-29), TFLOP/s at 8 x 1024, 1 x 8192, and
    1024 behind 7168 tokens: with 32 query and 8 KV heads of 128, 357, 481 and 504 by whole blocks,
    262, 402 and 367 row by row with 128 rows; with 14 and 2 heads of 64, 249, 409 and 230 against
    237, 370 and 168. The settings for less shared memory took 0.7 to 0.8 of those with 128 rows.

    Args:
        row_bytes: of a key and its value, padded.
        element: bytes of one number of them.
        shared_memory: bytes that a block may have.
        by_block: whether blocks of `WHOLE_BLOCK` keys may come by descriptors. Two programs then
            share a multiprocessor, so that one multiplies while the other exponentiates.
    """
    if element == 4:
        return ExtendSettings(rows=32, block_bytes=32 * 1024, warps=4)
    if by_block and row_bytes <= 512 and shared_memory >= HOPPER_SHARED:
        block_bytes = WHOLE_BLOCK * row_bytes
        return ExtendSettings(rows=64, block_bytes=block_bytes, warps=4, stages=3, by_block=True)
    if row_bytes <= 256:
        return ExtendSettings(rows=64, block_bytes=16 * 1024, warps=4)
    if row_bytes <= 512 and shared_memory >= HOPPER_SHARED:
        return ExtendSettings(rows=128, block_bytes=64 * 1024, warps=8)
    return ExtendSettings(rows=64, block_bytes=32 * 1024, warps=4)
