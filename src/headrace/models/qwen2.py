"""Qwen2 and Qwen2.5 (Qwen team, 2024): Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from headrace.config.persona import LayerTraits, ModelTraits
from headrace.models import config_reader as read
from headrace.models.family_config import (
    FULL,
    SLIDING,
    read_heads,
    read_layers,
    read_traits,
    read_window,
)

# transformers' values for a config that has no key
WINDOW, FIRST_WINDOW_LAYER = 4096, 28


def qwen2_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of Qwen2ForCausalLM."""
    return read_traits(
        config,
        family="qwen2",
        attention=read_heads(config, qkv_bias=True),
        layers=qwen_layers(config),
    )


def qwen_layers(config: Mapping[str, Any]) -> tuple[LayerTraits, ...]:
    """Layers from `max_window_layers` on slide, where a window is used."""
    # 0 is a real value here: every layer slides
    first = config.get("max_window_layers")
    first = 0 if first == 0 else read.whole(config, "max_window_layers", FIRST_WINDOW_LAYER)
    kinds = [
        SLIDING if index >= first else FULL
        for index in range(read.whole(config, "num_hidden_layers"))
    ]
    return read_layers(config, window=qwen_window(config), default_kinds=kinds)


def qwen_window(config: Mapping[str, Any]) -> int | None:
    """The window where `use_sliding_window` says that it is used.

    Most published configs carry one that they do not use.
    """
    return read_window(config, WINDOW) if read.flag(config, "use_sliding_window", False) else None
