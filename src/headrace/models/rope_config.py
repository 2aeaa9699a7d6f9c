"""Rope parameters from a config, in the spellings of transformers 4 and 5.

Version 4: `rope_theta`, `rope_scaling: {"type" or "rope_type": ..., "factor": ...}`,
`partial_rotary_factor` at the top. Version 5: all of it in `rope_parameters`, for some families an
object per kind of layer.
"""

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.config.persona import RopeTraits
from headrace.layers.rope_frequencies import supported_rope_kinds
from headrace.models import config_reader as read

DEFAULT_THETA = 10_000.0
_NEEDS_ORIGINAL = ("yarn", "llama3", "longrope")


def rope_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope's own object, whichever spelling holds it, empty for a plain rope."""
    scaling = read.section(config, "rope_scaling") or read.section(config, "rope_parameters")
    return dict(scaling or {})


def read_rope(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float = DEFAULT_THETA,
) -> RopeTraits:
    """One rope.

    Args:
        config: the model's config, for lengths and for what version 4 keeps at the top.
        parameters: the rope's own object.
        head_dim: size of a head, of which `partial_rotary_factor` may rotate a part.
        theta: base when the config names none.

    Raises:
        UnsupportedError: an unknown kind of rope; lists the known ones.
        CheckpointError: a parameter that the kind needs is missing or of the wrong type.
    """
    kind = read.text(parameters, "rope_type", read.text(parameters, "type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)  # the name Phi-3 used before the paper's
    if kind not in supported_rope_kinds():
        raise UnsupportedError(
            f"Rope type {kind!r} is not supported",
            remedy=f"Supported: {', '.join(supported_rope_kinds())}",
        )
    max_position = read.whole(config, "max_position_embeddings")
    original = read.optional_whole(config, "original_max_position_embeddings")
    if original is None:  # a value at the top wins over one inside, as in transformers
        original = read.optional_whole(parameters, "original_max_position_embeddings")
    if original is None and kind in _NEEDS_ORIGINAL:
        original = max_position
    partial = read.number(
        parameters, "partial_rotary_factor", read.number(config, "partial_rotary_factor", 1.0)
    )
    traits = RopeTraits(
        kind=kind,
        theta=read.number(parameters, "rope_theta", read.number(config, "rope_theta", theta)),
        rotary_dim=int(head_dim * partial),
        max_position=max_position,
        factor=read.optional_number(parameters, "factor"),
        original_max_position=original,
        attention_factor=read.optional_number(parameters, "attention_factor"),
        beta_fast=read.optional_number(parameters, "beta_fast"),
        beta_slow=read.optional_number(parameters, "beta_slow"),
        mscale=read.optional_number(parameters, "mscale"),
        mscale_all_dim=read.optional_number(parameters, "mscale_all_dim"),
        truncate=read.flag(parameters, "truncate", True),
        low_freq_factor=read.optional_number(parameters, "low_freq_factor"),
        high_freq_factor=read.optional_number(parameters, "high_freq_factor"),
        short_factor=read.numbers(parameters, "short_factor"),
        long_factor=read.numbers(parameters, "long_factor"),
    )
    _check(traits, head_dim)
    return traits


def context_length(rope: RopeTraits) -> int:
    """The longest sequence that the rope was made for.

    The field does not agree on what `max_position_embeddings` means beside a scaled rope. Linear,
    dynamic and yarn checkpoints state the length before stretching, so the context is factor x
    original (the original is `original_max_position_embeddings` where stated); llama3 and
    longrope checkpoints state the stretched length.
    """
    if rope.kind in ("linear", "dynamic", "yarn") and rope.factor is not None:
        return int(rope.factor * (rope.original_max_position or rope.max_position))
    return rope.max_position


def _check(traits: RopeTraits, head_dim: int) -> None:
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }.get(traits.kind, ())
    for name in needed:
        if getattr(traits, name) is None:
            raise CheckpointError(
                f"The rope parameters in the model's config have no {name}",
                why=f"rope type {traits.kind!r} needs it",
            )
    if not 2 <= traits.rotary_dim <= head_dim or traits.rotary_dim % 2:
        raise CheckpointError(
            f"The model's config rotates {traits.rotary_dim} of {head_dim} dimensions of a head",
            why="an even number from 2 to the head's size must rotate",
        )
    pairs = traits.rotary_dim // 2
    for name in ("short_factor", "long_factor"):
        values = getattr(traits, name)
        if values is not None and len(values) != pairs:
            raise CheckpointError(
                f"{name} in the model's config has {len(values)} numbers",
                why=f"the rope has {pairs} frequencies",
            )
