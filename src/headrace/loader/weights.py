"""Fill a model from a checkpoint: every parameter exactly once, nothing left over.

Names, shapes and dtypes are compared before the first byte of a weight is read. Tensors are read in
the order of the files, one at a time. Two threads were tried: on two cores they won nothing that
could be measured against the noise, so there is one.
"""

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from tqdm import tqdm

from headrace.base.errors import CapacityError, CheckpointError, UnsupportedError
from headrace.base.shown import first_of
from headrace.checkpoint.interface import Checkpoint, TensorEntry
from headrace.layers.weights import WeightSlot, weight_slots
from headrace.loader.tied_head import EMBEDDING, HEAD
from headrace.memory.free_memory import free_bytes
from headrace.models.decoder import CausalDecoder

_SHOWN = 5
_AS_STORED = frozenset({"F32", "BF16", "F16"})
# What safetensors can hold and no weight of a supported model is; a name of neither set is one of
# GGUF's packed formats.
_NO_WEIGHTS = frozenset(
    {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F64"},
)
_BELONG = "Check that config and weights belong together"


def load_weights(model: CausalDecoder, checkpoint: Checkpoint, *, progress: bool = False) -> None:
    """Copy all tensors of `checkpoint` into `model`.

    Args:
        model: freshly built; its parameters' content is undefined.
        progress: show a bar of bytes.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, unreadable, or too
            large for float16; names file and tensor.
        UnsupportedError: a tensor is of a type that holds no weights, or cannot be unpacked.
        CapacityError: the largest tensor cannot be unpacked in the memory that is free.
    """
    slots = _slots_by_stored_name(model, checkpoint)
    _check_names(slots, checkpoint, model.ignored_tensors())
    entries = [entry for name, entry in checkpoint.tensors.items() if name in slots]
    for entry in entries:
        _check_entry(entry, slots[entry.name])
    if next(model.parameters()).device.type != "cpu":
        _check_host_room(entries)
    total = sum(entry.nbytes for entry in entries)
    is_drawn = progress and sys.stderr is not None  # a service may have none
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not is_drawn
    ) as bar:
        for entry in entries:
            _fill(slots[entry.name], checkpoint, entry)
            bar.update(entry.nbytes)


def check_room(needed: int, device_name: str, free: int | None) -> None:
    """Compare the bytes of all parameters with free memory before anything is read.

    Args:
        needed: bytes of all parameters in the model's dtype.
        free: bytes free on the device; `None` where the system does not say: nothing is checked.

    Raises:
        CapacityError: they do not fit; says both numbers.
    """
    if free is not None and needed > free:
        raise CapacityError(
            f"The weights need {needed:,} bytes, {device_name} has {free:,} free",
            remedy="Take a smaller model or dtype, or free memory on the device",
        )


def _slots_by_stored_name(model: CausalDecoder, checkpoint: Checkpoint) -> dict[str, WeightSlot]:
    """Slots under the names of the file: a tied model's one table may be stored as the head."""
    slots = weight_slots(model)
    stored = checkpoint.tensors
    if model.traits.tie_word_embeddings and HEAD in stored and EMBEDDING not in stored:
        slots[HEAD] = slots.pop(EMBEDDING)
    return slots


def _check_names(
    slots: Mapping[str, WeightSlot], checkpoint: Checkpoint, ignored: frozenset[str]
) -> None:
    stored = checkpoint.tensors
    missing = [name for name in slots if name not in stored]
    extra = [name for name in stored if name not in slots and name not in ignored]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path.name} lacks {_listing(missing)}",
            why="the model's config asks for every one of its parameters"
            + (f"; in their place it holds {_listing(extra)}" if extra else ""),
            remedy="Check that config and weights belong together and the download is complete",
        )
    if extra:
        raise CheckpointError(
            f"{stored[extra[0]].file.name} holds {_listing(extra)}",
            why="the model has no place for them, so it would compute something else",
            remedy=_BELONG,
        )


def _check_entry(entry: TensorEntry, slot: WeightSlot) -> None:
    place = f"Tensor {entry.name} in {entry.file.name}"
    expected = tuple(slot.destination.shape)
    if tuple(entry.shape) != expected:
        raise CheckpointError(
            f"{place} has shape {list(entry.shape)}",
            why=f"the model's config asks for {list(expected)}",
            remedy=_BELONG,
        )
    if entry.dtype in _NO_WEIGHTS:
        raise UnsupportedError(
            f"{place} is stored as {entry.dtype}",
            why="weights are read from float32, bfloat16, float16 and GGUF's packed formats",
            remedy="Convert the checkpoint to one of these",
        )


def _fill(slot: WeightSlot, checkpoint: Checkpoint, entry: TensorEntry) -> None:
    """Packed tensors are unpacked where they belong, if that is host memory: half the time."""
    place = slot.destination
    direct = place.device.type == "cpu" and place.is_contiguous() and not slot.offset
    tensor = checkpoint.read(entry.name, out=place if direct else None)
    if tensor is not place:
        slot.fill(tensor)
    _check_overflow(entry, place)


def _check_host_room(entries: Iterable[TensorEntry]) -> None:
    """On its way to a device a packed tensor is unpacked to float32 on the host."""
    unpacked = {
        entry: 4 * torch.Size(entry.shape).numel()
        for entry in entries
        if entry.dtype not in _AS_STORED
    }
    free = free_bytes(torch.device("cpu"))
    if not unpacked or free is None:
        return
    largest = max(unpacked, key=lambda entry: unpacked[entry])
    if unpacked[largest] > free:
        raise CapacityError(
            f"Tensor {largest.name} in {largest.file.name} needs {unpacked[largest]:,} bytes of "
            f"host memory while it is unpacked, {free:,} are free",
            remedy="Free memory, or take a smaller model",
        )


def _check_overflow(entry: TensorEntry, destination: Tensor) -> None:
    """A weight that float16 cannot hold would be infinite, and every answer an error."""
    if destination.dtype is not torch.float16 or entry.dtype == "F16":
        return
    if destination.isinf().any():
        raise CheckpointError(
            f"Tensor {entry.name} in {entry.file.name} holds numbers too large for float16",
            why="they end at 65504",
            remedy="Load with dtype bfloat16 or float32",
        )


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return ("tensor " if len(names) == 1 else "tensors ") + first_of(names, _SHOWN)
