"""Rotary frequencies: one function for each rule by which checkpoints stretch their context.

Each returns inverse frequencies [rotary_dim / 2] float32 and the factor on cos and sin. The
arithmetic is float32 in the order the published checkpoints were made with, so that angles at far
positions agree with the reference.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from headrace.base.errors import UnsupportedError
from headrace.config.persona import RopeTraits
from headrace.config.plan import RopePlan

Frequencies = tuple[Tensor, float]
T = TypeVar("T")
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0  # the paper's choice for Llama


def rope_frequencies(plan: RopePlan) -> Frequencies:
    """Inverse frequencies [rotary_dim / 2] float32 and attention factor of a settled rope."""
    traits = plan.traits
    if traits.kind not in _RULES:
        raise UnsupportedError(
            f"Rope type {traits.kind!r} is not supported", remedy=f"Supported: {', '.join(_RULES)}"
        )
    return _RULES[traits.kind](traits, plan.length)


def supported_rope_kinds() -> tuple[str, ...]:
    return tuple(_RULES)


def _needed(value: T | None) -> T:
    assert value is not None, "the reader of the config demands what a rope kind needs"
    return value


def _powers(traits: RopeTraits, theta: float | None = None) -> Tensor:
    steps = torch.arange(0, traits.rotary_dim, 2, dtype=torch.float32) / traits.rotary_dim
    powers: Tensor = (traits.theta if theta is None else theta) ** steps
    return powers


def _default(traits: RopeTraits, length: int) -> Frequencies:
    return 1.0 / _powers(traits), 1.0


def _linear(traits: RopeTraits, length: int) -> Frequencies:
    """Position interpolation (Chen et al., 2023)."""
    return 1.0 / _powers(traits) / _needed(traits.factor), 1.0


def _dynamic(traits: RopeTraits, length: int) -> Frequencies:
    """NTK-aware scaling of the base (bloc97, emozilla), for the longest sequence to come."""
    factor, dim = _needed(traits.factor), traits.rotary_dim
    length = max(length, traits.max_position)
    stretch = factor * length / traits.max_position - (factor - 1)
    return 1.0 / _powers(traits, traits.theta * stretch ** (dim / (dim - 2))), 1.0


def _yarn(traits: RopeTraits, length: int) -> Frequencies:
    """YaRN (Peng et al., 2023): fast frequencies stay, slow ones are interpolated, a ramp between.

    The attention factor of DeepSeek is a quotient of two scales (`mscale`, `mscale_all_dim`).
    """
    original = _needed(traits.original_max_position)
    factor = traits.factor if traits.factor is not None else traits.max_position / original
    powers = _powers(traits)
    low = _yarn_dimension(traits, traits.beta_fast or YARN_BETA_FAST)
    high = _yarn_dimension(traits, traits.beta_slow or YARN_BETA_SLOW)
    if traits.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, traits.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(powers), dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp)

    attention_factor = traits.attention_factor
    if attention_factor is None and traits.mscale and traits.mscale_all_dim:
        attention_factor = _yarn_scale(factor, traits.mscale) / _yarn_scale(
            factor, traits.mscale_all_dim
        )
    elif attention_factor is None:
        attention_factor = _yarn_scale(factor, 1.0)
    return frequencies, attention_factor


def _yarn_dimension(traits: RopeTraits, rotations: float) -> float:
    """The dimension that turns `rotations` times within the original context."""
    original = _needed(traits.original_max_position)
    turns = math.log(original / (rotations * 2 * math.pi))
    return traits.rotary_dim * turns / (2 * math.log(traits.theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(traits: RopeTraits, length: int) -> Frequencies:
    """Llama 3.1: waves longer than the original context are stretched, short ones kept."""
    factor, original = _needed(traits.factor), _needed(traits.original_max_position)
    low, high = _needed(traits.low_freq_factor), _needed(traits.high_freq_factor)
    frequencies = 1.0 / _powers(traits)
    turns = original / (2 * math.pi / frequencies)  # within the original context
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow, fast = turns < low, turns > high
    kept = torch.where(slow, frequencies / factor, between)
    return torch.where(fast, frequencies, kept), 1.0


def _longrope(traits: RopeTraits, length: int) -> Frequencies:
    """LongRoPE (Ding et al., 2024): searched divisors, one set within the original context and one
    past it. Which set holds is settled for the longest sequence to come. Divisors stored in GGUF
    files come this way too."""
    original = _needed(traits.original_max_position)
    divisors = _needed(traits.long_factor if length > original else traits.short_factor)
    attention_factor = traits.attention_factor
    if attention_factor is None:
        factor = traits.factor if traits.factor is not None else traits.max_position / original
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    return 1.0 / (torch.tensor(divisors) * _powers(traits)), attention_factor


_RULES: dict[str, Callable[[RopeTraits, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
