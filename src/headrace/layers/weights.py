"""The contract between a model and the loader: which checkpoint tensor fills which memory.

Every layer that owns parameters declares its own slots, so that merging q, k and v into one matrix
is known to the one layer that does it and to nobody else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headrace.base.errors import CheckpointError
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.weight_formats import DENSE, WeightFormat
from headrace.memory.arena import Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One checkpoint tensor and its place.

    Attributes:
        name: the tensor's name in the checkpoint.
        destination: a view into a parameter, of the tensor's shape and the model's dtype.
        offset: added to the stored values. Gemma stores its norm weights as deviations from 1;
            the layer keeps the sum, so that the forward need not add.
    """

    name: str
    destination: Tensor
    offset: float = 0.0

    def fill(self, tensor: Tensor) -> None:
        """Copy the stored tensor into its place, converting device and dtype.

        Raises:
            CheckpointError: the shape is not the one the model expects.
        """
        if tensor.shape != self.destination.shape:
            raise CheckpointError(
                f"Tensor {self.name} has shape {list(tensor.shape)}",
                why=f"the model's config asks for {list(self.destination.shape)}",
                remedy="Check that config and weights belong together",
            )
        with torch.no_grad():
            self.destination.copy_(tensor.float() + self.offset if self.offset else tensor)


@runtime_checkable
class HasSlots(Protocol):
    """A layer that owns parameters."""

    def slots(self, path: str) -> Iterator[WeightSlot]:
        """Slots of the layer's own parameters; `path` is its place in the module tree."""
        ...


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Checkpoint tensor name -> slot, for every tensor the model needs, each exactly once.

    Every parameter of the model is covered by slots in full; anything else is our own bug.
    """
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if not isinstance(module, HasSlots):
            assert not parameters, f"{path} owns parameters and declares no slots"
            continue
        elements = 0
        for slot in module.slots(path):
            assert slot.name not in slots, f"two layers claim {slot.name}"
            slots[slot.name] = slot
            elements += slot.destination.numel()
        owned = sum(parameter.numel() for parameter in parameters)
        assert elements == owned, f"the slots of {path} cover {elements} of {owned} elements"
    return slots


@runtime_checkable
class Finishes(Protocol):
    """A layer whose loaded weights become something else."""

    def finish(self) -> None: ...


def finish_weights(model: nn.Module) -> None:
    """Turn loaded weights into the form of their format; once, when every slot is filled.

    Layer by layer, so that only one layer is there twice at a time.
    """
    for module in model.modules():
        if isinstance(module, Finishes):
            module.finish()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, as loaded or finished (oneDNN's memory is not the arena's)."""
    loaded = sum(parameter.nbytes for parameter in model.parameters())
    found = (getattr(module, "finished", None) for module in model.modules())
    finished: list[Tensor] = [weight for weight in found if weight is not None]
    return loaded + sum(weight.numel() * weight.element_size() for weight in finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpace:
    """Where the parameters of a model are made, and how layers keep and use theirs."""

    dtype: torch.dtype
    arena: Arena
    format: WeightFormat = DENSE
    operators: Operators = TORCH_OPERATORS

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter with undefined content, to be filled by the loader."""
        memory = self.arena.allocate("weights", shape, dtype or self.dtype, zero=False)
        return nn.Parameter(memory, requires_grad=False)


def sibling(path: str, name: str) -> str:
    """Path of `name` beside the module at `path`."""
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
