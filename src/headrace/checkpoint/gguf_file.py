"""Reads the header of a GGUF file: metadata and the table of tensors.

The layout is that of the GGUF specification (ggml-org/ggml, docs/gguf.md): magic, version, counts,
key-value pairs, tensor infos, then the aligned data section. Numbers of an array are read in one
go, only strings are walked: a vocabulary of 262144 tokens takes about 0.15 s.
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.gguf_types import GGML_TYPES, GgmlType
from headrace.checkpoint.lfs_pointer import refuse_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor as the file describes it; `shape` is slowest dimension first, `start` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    start: int
    nbytes: int


class GgufFile:
    """An open GGUF file: metadata by key, tensors by name, bytes by tensor.

    Raises:
        CheckpointError: not a GGUF file, truncated, a tensor beyond the end or named twice.
        UnsupportedError: an old or big-endian file, an unknown tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
            raise CheckpointError(f"{path} cannot be read", why=str(error)) from error
        cursor = _Cursor(self._bytes, path)
        tensor_count, pair_count = _read_preamble(cursor)
        self.metadata: Mapping[str, Any] = _read_metadata(cursor, pair_count)
        self._metadata_end = cursor.position
        self.tensors: Mapping[str, GgufTensor] = self._read_tensors(cursor, tensor_count)

    def metadata_hash(self) -> str:
        """sha256 of the metadata as it stands in the file: the same wherever the file lies."""
        return hashlib.sha256(self._bytes[: self._metadata_end]).hexdigest()

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, uint8 [rows, bytes per row], a view of the mapped file."""
        flat = np.frombuffer(self._bytes, np.uint8, count=tensor.nbytes, offset=tensor.start)
        return flat.reshape(prod(tensor.shape[:-1]), -1)

    def _read_tensors(self, cursor: "_Cursor", count: int) -> dict[str, GgufTensor]:
        infos = [_read_tensor_info(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise CheckpointError(f"{self.path} holds the tensor {name} twice")
            nbytes = prod(shape[:-1]) * kind.row_bytes(shape[-1])
            start = data_start + offset
            if start + nbytes > len(self._bytes):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name} ends at byte {start + nbytes}",
                    why=f"The file has {len(self._bytes)} bytes",
                    remedy="Download or copy the file again",
                )
            tensors[name] = GgufTensor(
                name=name, shape=shape, kind=kind, start=start, nbytes=nbytes
            )
        return tensors


class _Cursor:
    """A reading position in the header; running off the end is a CheckpointError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: it ends inside its header",
                remedy="Download or copy the file again",
            )
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings, each a uint64 length and UTF-8 bytes."""
        data, position, size = self.data, self.position, len(self.data)
        length_at = _UINT64.unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > size:
                    break
                found.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} holds text that is not UTF-8", why=str(error)
            ) from error
        except struct.error:
            position = size + 1
        self.position = min(position, size)
        if position > size:
            self.take(size)  # reports the truncation
        return found

    def numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        refuse_pointer(cursor.path)
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file",
            why=f"It starts with {cursor.data[:4]!r} in place of {MAGIC!r}",
        )
    cursor.take(4)
    version = cursor.uint32()
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise UnsupportedError(
            f"{cursor.path} is a GGUF file "
            + ("in big-endian byte order" if big_endian else f"of version {version}"),
            remedy=f"Supported: little-endian, versions {VERSIONS[0]} and {VERSIONS[1]}",
        )
    return cursor.uint64(), cursor.uint64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{cursor.path} holds the metadata key {key} twice")
        metadata[key] = _read_value(cursor, cursor.uint32(), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    """A Python scalar, or a list of them (numbers of an array: a numpy array)."""
    if kind == _STRING:
        return cursor.string()
    if kind == _BOOL:
        return cursor.take(1) != b"\0"
    if kind in _NUMBERS:
        return cursor.numbers(kind, 1)[0].item()
    if kind != _ARRAY:
        raise CheckpointError(f"{cursor.path}: metadata key {key} has the unknown type {kind}")
    item_kind, count = cursor.uint32(), cursor.uint64()
    if item_kind == _STRING:
        return cursor.strings(count)
    if item_kind == _BOOL:
        return cursor.numbers(0, count).astype(bool)
    if item_kind in _NUMBERS:
        return cursor.numbers(item_kind, count)
    return [_read_value(cursor, item_kind, key) for _ in range(count)]


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GgmlType, int]:
    name = cursor.string()
    dimensions = cursor.uint32()
    if not 1 <= dimensions <= 4:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {dimensions} dimensions")
    # The file lists the fastest dimension first.
    shape = tuple(reversed([cursor.uint64() for _ in range(dimensions)]))
    if 0 in shape:
        raise CheckpointError(f"{cursor.path}: tensor {name} is empty, its shape is {shape}")
    kind_id, offset = cursor.uint32(), cursor.uint64()
    kind = GGML_TYPES.get(kind_id)
    if kind is None:
        raise UnsupportedError(
            f"{cursor.path}: tensor {name} has the GGUF type {kind_id}",
            remedy=f"Supported: {', '.join(known.name for known in GGML_TYPES.values())}",
        )
    if shape[-1] % kind.block_elements:
        raise CheckpointError(
            f"{cursor.path}: a row of tensor {name} has {shape[-1]} elements",
            why=f"{kind.name} packs blocks of {kind.block_elements}",
        )
    return name, shape, kind, offset
