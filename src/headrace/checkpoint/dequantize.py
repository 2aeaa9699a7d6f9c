"""Packed GGUF tensors to float32.

The types of common files have vectorised code of their own here (10 to 20 times as fast as the
`gguf` package on one core, equal bit for bit); all others go through that optional package. The
block layouts are facts of the format (ggml-org/ggml, ggml-common.h).

Blocks are worked on a few thousand at a time, so that intermediate arrays stay in the cache. Bits
are taken apart with numpy, numbers scaled with torch: each is the faster one at its half.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from headrace.base.errors import UnsupportedError
from headrace.checkpoint.gguf_types import GgmlType

Bytes = npt.NDArray[np.uint8]

# Elements of one working set: fits a core's second-level cache, and one below the size at which
# torch spreads an operation over threads. Thousands of tiny operations that each wait for a second
# thread take a hundred times as long on a busy machine; whoever wants two cores reads two tensors.
_ELEMENTS_AT_ONCE = 32767
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


def dequantize(raw: Bytes, kind: GgmlType, out: torch.Tensor | None = None) -> torch.Tensor:
    """Unpack rows of blocks.

    Args:
        raw: uint8 [rows, bytes per row], contiguous or not.
        kind: the tensor's type; not one of the plain float types.
        out: contiguous, on the CPU, [rows, elements per row] of a float type, which the float32
            results are rounded to; `None`: float32, freshly allocated.

    Returns:
        `out`, or what takes its place.

    Raises:
        UnsupportedError: the type needs the `gguf` package and it is absent.
    """
    unpack = _UNPACKERS.get(kind.name)
    if unpack is None:
        floats = _dequantize_by_package(raw, kind)
        return floats if out is None else out.copy_(floats)
    blocks = raw.reshape(-1, kind.block_bytes)  # [blocks, bytes]
    if out is None:
        out = torch.empty(raw.shape[0], raw.shape[1] // kind.block_bytes * kind.block_elements)
    elements = out.view(-1, kind.block_elements)
    step = _ELEMENTS_AT_ONCE // kind.block_elements
    scratch = None if out.dtype is torch.float32 else torch.empty(step, kind.block_elements)
    for start in range(0, blocks.shape[0], step):
        part = elements[start : start + step]
        if scratch is None:
            unpack(blocks[start : start + step], part)
        else:
            unpack(blocks[start : start + step], scratch[: len(part)])
            part.copy_(scratch[: len(part)])
    return out


def _dequantize_by_package(raw: Bytes, kind: GgmlType) -> torch.Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as package_dequantize
    except ImportError as error:
        raise UnsupportedError(
            f"Unpacking {kind.name} tensors needs the gguf package",
            why="Only common types have code of their own: " + ", ".join(_UNPACKERS),
            remedy="pip install 'headrace[demo]'",
        ) from error
    floats = package_dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(kind.id))
    return torch.from_numpy(np.ascontiguousarray(floats, np.float32))


def _half(blocks: Bytes, start: int) -> torch.Tensor:
    """The float16 number at byte `start` of every block, as float32 [blocks, 1]."""
    packed = np.ascontiguousarray(blocks[:, start : start + 2])
    return torch.from_numpy(packed.view(np.float16)).float()


def _nibbles(packed: Bytes) -> Bytes:
    """The low nibbles of each row, then its high nibbles: [rows, n] to [rows, 2, n]."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    # A row moves as one item: many times as fast as copying it element by element.
    row = np.dtype((np.void, packed.shape[1]))
    numbers = np.empty((packed.shape[0], 2), row)
    numbers[:, 0] = (words & _LOW_NIBBLES).view(row)[:, 0]
    numbers[:, 1] = ((words >> np.uint64(4)) & _LOW_NIBBLES).view(row)[:, 0]
    return numbers.view(np.uint8).reshape(-1, 2, packed.shape[1])


def _nibbles_and_fifth_bits(packed: Bytes, bits: Bytes) -> Bytes:
    """Five-bit numbers [blocks, 32] of 16 bytes of nibbles and 4 bytes of top bits, low first."""
    fifth = np.unpackbits(np.ascontiguousarray(bits).reshape(-1), bitorder="little")
    fifth <<= 4
    numbers = _nibbles(packed).reshape(-1, 32)
    numbers |= fifth.reshape(-1, 32)
    return numbers


def _scale(
    numbers: Bytes | npt.NDArray[np.int8],
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out = numbers * scale + minimum, each step rounded to float32 as the reference does."""
    out.copy_(torch.from_numpy(numbers)).mul_(scale)
    if minimum is not None:
        out.add_(minimum)


def _unpack_q8_0(blocks: Bytes, out: torch.Tensor) -> None:
    _scale(blocks[:, 2:].view(np.int8), _half(blocks, 0), None, out)


def _unpack_q4_0(blocks: Bytes, out: torch.Tensor) -> None:
    numbers = _nibbles(blocks[:, 2:]).reshape(-1, 32).view(np.int8)
    numbers -= 8
    _scale(numbers, _half(blocks, 0), None, out)


def _unpack_q4_1(blocks: Bytes, out: torch.Tensor) -> None:
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    _scale(_nibbles(blocks[:, 4:]).reshape(-1, 32), scale, minimum, out)


def _unpack_q5_0(blocks: Bytes, out: torch.Tensor) -> None:
    numbers = _nibbles_and_fifth_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8)
    numbers -= 16
    _scale(numbers, _half(blocks, 0), None, out)


def _unpack_q5_1(blocks: Bytes, out: torch.Tensor) -> None:
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    _scale(_nibbles_and_fifth_bits(blocks[:, 8:], blocks[:, 4:8]), scale, minimum, out)


def _six_bit_pairs(packed: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and 8 minima of Q4_K and Q5_K: [blocks, 12] to two of [blocks, 8].

    Four of each lie in the low six bits of bytes 0-3 and 4-7; the others have their low four bits
    in bytes 8-11 and their top two bits above those of the first.
    """
    first_scales, first_minima, mixed = np.split(packed, 3, axis=1)
    scales = (first_scales & 63, (mixed & 15) | ((first_scales >> 2) & 48))
    minima = (first_minima & 63, (mixed >> 4) | ((first_minima >> 2) & 48))
    return (
        torch.from_numpy(np.concatenate(scales, axis=1)),
        torch.from_numpy(np.concatenate(minima, axis=1)),
    )


def _scale_groups(blocks: Bytes, numbers: Bytes, out: torch.Tensor) -> None:
    """Q4_K and Q5_K: 8 groups of 32 numbers [blocks, 8, 32], each with a scale and a minimum."""
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    _scale(numbers, (scale * scales)[:, :, None], -(minimum * minima)[:, :, None], groups)


def _unpack_q4_k(blocks: Bytes, out: torch.Tensor) -> None:
    # A run of 32 bytes holds two groups: low nibbles, then high nibbles.
    runs = np.ascontiguousarray(blocks[:, 16:]).reshape(-1, 32)
    _scale_groups(blocks, _nibbles(runs).reshape(-1, 8, 32), out)


def _unpack_q5_k(blocks: Bytes, out: torch.Tensor) -> None:
    runs = np.ascontiguousarray(blocks[:, 48:]).reshape(-1, 32)
    numbers = _nibbles(runs).reshape(-1, 8, 32)
    high = blocks[:, 16:48]  # bit g of byte i belongs to element i of group g
    for group in range(8):
        numbers[:, group] |= ((high >> group) & 1) << 4
    _scale_groups(blocks, numbers, out)


def _unpack_q6_k(blocks: Bytes, out: torch.Tensor) -> None:
    # Two halves of 128 elements. In each, 64 bytes give the low four bits of elements 0-63 (low
    # nibbles) and 64-127 (high nibbles); byte i of 32 gives two top bits of elements i + 32 j.
    runs = np.ascontiguousarray(blocks[:, :128]).reshape(-1, 64)
    numbers = _nibbles(runs).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for group in range(4):
        numbers[:, :, group] |= ((high >> (2 * group)) & 3) << 4
    signed = numbers.reshape(-1, 16, 16).view(np.int8)
    signed -= 32
    scales = torch.from_numpy(np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))
    scale = _half(blocks, 208) * scales  # [blocks, 16]
    _scale(signed, scale[:, :, None], None, out.view(-1, 16, 16))


_UNPACKERS: dict[str, Callable[[Bytes, torch.Tensor], None]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
}
