"""Qwen2 and Qwen2.5 (Qwen team, 2024): Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from headrace.config.persona import LayerTraits, ModelTraits
from headrace.models import config_reader as read
from headrace.models.decoder import CausalDecoder
from headrace.models.family_config import (
    FULL,
    SLIDING,
    read_heads,
    read_layers,
    read_traits,
    read_window,
)
from headrace.models.rope_config import context_length, read_rope, rope_section

# transformers' values for a config that has no key
WINDOW, FIRST_WINDOW_LAYER = 4096, 28


class Qwen2ForCausalLM(CausalDecoder):
    """Pre-norm blocks with biased q, k, v."""


def qwen2_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of Qwen2ForCausalLM."""
    attention = read_heads(config, qkv_bias=True)
    rope = read_rope(config, rope_section(config), head_dim=attention.head_dim)
    return read_traits(
        config,
        family="qwen2",
        attention=attention,
        layers=qwen_layers(config),
        ropes={"default": rope},
        max_position=context_length(rope),
    )


def qwen_layers(config: Mapping[str, Any]) -> tuple[LayerTraits, ...]:
    """Layers from `max_window_layers` on slide, but only if `use_sliding_window` says so.

    Most published configs carry a window that they do not use.
    """
    window = None
    if read.flag(config, "use_sliding_window", False):
        window = read_window(config, WINDOW)
    # 0 is a real value here: every layer slides
    first = config.get("max_window_layers")
    first = 0 if first == 0 else read.whole(config, "max_window_layers", FIRST_WINDOW_LAYER)
    kinds = [
        SLIDING if index >= first else FULL
        for index in range(read.whole(config, "num_hidden_layers"))
    ]
    return read_layers(config, window=window, default_kinds=kinds)
