"""Fill a model from a checkpoint: every parameter exactly once, nothing left over."""

from collections.abc import Iterable, Mapping

from tqdm import tqdm

from headrace.base.errors import CapacityError, CheckpointError
from headrace.checkpoint.interface import Checkpoint
from headrace.layers.weights import WeightSlot, weight_slots
from headrace.models.decoder import CausalDecoder

SHOWN = 5


def load_weights(model: CausalDecoder, checkpoint: Checkpoint, *, progress: bool = False) -> None:
    """Copy all tensors of `checkpoint` into `model`.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape; names file and
            tensor, before anything is read where names and shapes tell.
    """
    slots = weight_slots(model)
    _check_names(slots, checkpoint, model.ignored_tensors())
    names = [name for name in checkpoint.tensors if name in slots]
    for name in tqdm(names, desc="Loading weights", unit="tensor", disable=not progress):
        slots[name].fill(checkpoint.read(name))


def _check_names(
    slots: Mapping[str, WeightSlot], checkpoint: Checkpoint, ignored: frozenset[str]
) -> None:
    stored = checkpoint.tensors
    missing = [name for name in slots if name not in stored]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path.name} lacks {_listing(missing)}",
            why="the model's config asks for every one of its parameters",
            remedy="Check that config and weights belong together and the download is complete",
        )
    extra = [name for name in stored if name not in slots and name not in ignored]
    if extra:
        raise CheckpointError(
            f"{stored[extra[0]].file.name} holds {_listing(extra)}",
            why="the model has no place for them, so it would compute something else",
            remedy="Check that config and weights belong together",
        )
    for name, slot in slots.items():
        entry = stored[name]
        if tuple(entry.shape) != tuple(slot.destination.shape):
            raise CheckpointError(
                f"Tensor {name} in {entry.file.name} has shape {list(entry.shape)}",
                why=f"the model's config asks for {list(slot.destination.shape)}",
                remedy="Check that config and weights belong together",
            )


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ("tensor " if len(names) == 1 else "tensors ") + ", ".join(names[:SHOWN]) + more


def check_room(needed: int, device_name: str, free: int | None) -> None:
    """Compare the bytes of all parameters with free memory before anything is read."""
    if free is not None and needed > free:
        raise CapacityError(
            f"The weights need {needed:,} bytes, {device_name} has {free:,} free",
            remedy="Take a smaller model or dtype, or free memory on the device",
        )
