"""Who a runner is, and what the plan needs to know of its files."""

from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.interface import Checkpoint
from headrace.config.persona import Coordinates, Persona, Role
from headrace.models.registry import read_model_traits
from headrace.runner.choices import CheckpointFacts

_PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def persona_of(
    checkpoint_config: Mapping[str, Any],
    *,
    role: Role = Role.TARGET,
    coordinates: Coordinates | None = None,
) -> Persona:
    """Read the traits of the model and add the runner's role and place.

    Raises:
        UnsupportedError: the architecture, weight format or rope is not supported, by name.
        CheckpointError: a key of the config is missing or of the wrong type.
    """
    return Persona(
        traits=read_model_traits(checkpoint_config),
        role=role,
        coordinates=coordinates or Coordinates(),
    )


def facts_of(checkpoint: Checkpoint) -> CheckpointFacts:
    """Format and stored dtype of an open checkpoint, from its headers."""
    bytes_by_dtype: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        dtype = _PLAIN.get(tensor.dtype, "packed")
        bytes_by_dtype[dtype] = bytes_by_dtype.get(dtype, 0) + tensor.nbytes
    return CheckpointFacts(
        load_format="safetensors" if checkpoint.path.is_dir() else "gguf",
        dtype=max(bytes_by_dtype, key=bytes_by_dtype.__getitem__, default=None),
    )
