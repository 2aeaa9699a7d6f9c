"""Who a runner is: the persona read from a checkpoint's config."""

from collections.abc import Mapping
from typing import Any

from headrace.config.persona import Coordinates, Persona, Role
from headrace.models.registry import read_model_traits


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
