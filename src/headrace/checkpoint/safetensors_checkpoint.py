"""A Hugging Face folder: config.json beside one or many .safetensors files.

The layout of the files: 8 bytes little-endian length, a JSON header, the data
(huggingface/safetensors, README).
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.folder_files import (
    SUPPORTED_FORMATS,
    folder_tokenizer_source,
    named_like,
    optional_json,
    read_json,
    refuse_quantized,
)
from headrace.checkpoint.interface import TensorEntry
from headrace.checkpoint.json_shapes import GenerationConfig, ModelConfig, WeightIndex
from headrace.checkpoint.lfs_pointer import refuse_pointer
from headrace.checkpoint.stated_pooling import folder_pooling
from headrace.config.tokenizer_source import TokenizerSource

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
_LONGEST_NAME = 255  # characters that file systems allow
_COPY_AGAIN = "Download or copy the file again"


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsCheckpoint:
    """See `Checkpoint`. `read` gives a view of the mapped file; it may be called from threads.

    Args:
        folder: holds config.json and the weights.
        weights: False accepts a folder without weights, for a plan or dummy weights.

    Raises:
        CheckpointError: a file missing, unreadable or truncated, a tensor missing or held twice.
        UnsupportedError: a packed format (AWQ, GPTQ, fp8, ...).
    """

    def __init__(self, folder: Path, *, weights: bool = True) -> None:
        self.path = folder
        self.config: Mapping[str, Any] = read_json(folder / "config.json", ModelConfig)
        refuse_quantized(folder, self.config)
        self.generation_config: Mapping[str, Any] = optional_json(
            folder / "generation_config.json", GenerationConfig
        )
        entries = _read_entries(folder, weights)
        self._left_out = _left_out(entries)
        self.tensors: Mapping[str, TensorEntry] = entries
        if self._left_out:
            self.tensors = {
                (full := self._left_out + name): replace(entry, name=full)
                for name, entry in entries.items()
            }
        self._handles: dict[Path, Any] = {}
        self._lock = Lock()

    @cached_property
    def tokenizer_source(self) -> TokenizerSource | None:
        return folder_tokenizer_source(self.path, self.config, self.generation_config)

    @cached_property
    def pooling(self) -> str | None:
        return folder_pooling(self.path)

    def read(self, name: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
        entry = self.tensors[name]
        try:
            with self._lock:
                if entry.file not in self._handles:
                    self._handles[entry.file] = safe_open(entry.file, framework="pt")
            stored = name.removeprefix(self._left_out)
            tensor: torch.Tensor = self._handles[entry.file].get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{entry.file}: tensor {name} cannot be read", why=str(error), remedy=_COPY_AGAIN
            ) from error
        return tensor


def _left_out(entries: Mapping[str, TensorEntry]) -> str:
    """What every name lacks in a file that was saved from a model without its head (transformers'
    AutoModel), as those for embedding are."""
    return "model." if "embed_tokens.weight" in entries and "lm_head.weight" not in entries else ""


def _read_entries(folder: Path, weights: bool) -> dict[str, TensorEntry]:
    """One whole file goes before an index, as in transformers: that may be of an older save."""
    index_file = folder / INDEX_NAME
    if (folder / SINGLE_NAME).is_file() or not index_file.is_file():
        file = _single_file(folder)
        if file is None and weights:
            raise CheckpointError(f"{folder} holds no .safetensors file")
        return {} if file is None else _read_header(file)
    placed = read_json(index_file, WeightIndex).get("weight_map")
    if not placed:
        raise CheckpointError(f"{index_file} has no weight_map", remedy=_COPY_AGAIN)
    files = sorted(set(placed.values()))
    for name in files:
        _refuse_outside(index_file, name)
    missing = [name for name in files if not os.path.isfile(folder / name)]
    if missing:
        if not weights and len(missing) == len(files):
            return {}
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}",
            why=f"{INDEX_NAME} names {len(files)} files",
            remedy="Download or copy the missing files",
        )
    entries: dict[str, TensorEntry] = {}
    for file_name in files:
        for name, entry in _read_header(folder / file_name).items():
            if name in entries:
                raise CheckpointError(
                    f"{folder} holds the tensor {name} twice: "
                    f"in {entries[name].file.name} and in {file_name}"
                )
            entries[name] = entry
    for name, file_name in placed.items():
        if name not in entries or entries[name].file.name != Path(file_name).name:
            raise CheckpointError(
                f"{folder / file_name} lacks the tensor {name}",
                why=f"{INDEX_NAME} places it there",
                remedy=_COPY_AGAIN,
            )
    return entries


def _refuse_outside(index_file: Path, name: str) -> None:
    """A checkpoint's index may name files of its own folder, and no others."""
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or "" in parts or max(map(len, parts)) > _LONGEST_NAME:
        raise CheckpointError(
            f"{index_file}: weight_map names the file {name[:_LONGEST_NAME]!r}",
            why="It must be the name of a file in the same folder",
            remedy=_COPY_AGAIN,
        )


def _single_file(folder: Path) -> Path | None:
    if (folder / SINGLE_NAME).is_file():
        return folder / SINGLE_NAME
    found = named_like(folder, "*.safetensors")
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} .safetensors files and no {INDEX_NAME}",
            why=f"Which of them belong together is unknown: {', '.join(f.name for f in found)}",
            remedy=f"Add {INDEX_NAME}, or keep one file named {SINGLE_NAME}",
        )
    return found[0] if found else None


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """All tensors of one file, each checked to lie inside it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= size - 8 else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read", why=str(error)) from error
    if not header:
        refuse_pointer(file)
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file: its header does not fit in it",
            remedy=_COPY_AGAIN,
        )
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        described = {
            name: msgspec.json.decode(part, type=_HeaderEntry) for name, part in parts.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} has an unreadable header", why=str(error), remedy=_COPY_AGAIN
        ) from error
    data_bytes = size - 8 - length
    return {name: _entry(file, name, part, data_bytes) for name, part in described.items()}


def _entry(file: Path, name: str, part: _HeaderEntry, data_bytes: int) -> TensorEntry:
    if part.dtype not in _BYTES:
        raise UnsupportedError(
            f"{file}: tensor {name} has the type {part.dtype}", remedy=SUPPORTED_FORMATS
        )
    start, end = part.data_offsets
    nbytes = prod(part.shape) * _BYTES[part.dtype]
    if end - start != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name} takes {end - start} bytes",
            why=f"Its shape {list(part.shape)} of {part.dtype} needs {nbytes}",
        )
    if start < 0 or end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated or broken: tensor {name} takes bytes {start} to {end}",
            why=f"The data section has {data_bytes} bytes",
            remedy=_COPY_AGAIN,
        )
    return TensorEntry(name=name, shape=part.shape, dtype=part.dtype, file=file, nbytes=nbytes)
