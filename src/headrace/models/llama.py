"""Llama (Touvron et al., 2023), and Mistral, which is Llama with a window on every layer."""

from collections.abc import Mapping
from typing import Any

from headrace.config.persona import ModelTraits
from headrace.models import config_reader as read
from headrace.models.family_config import (
    FULL,
    SLIDING,
    read_heads,
    read_layers,
    read_traits,
    read_window,
)

MISTRAL_WINDOW = 4096  # transformers' value for a config that has no key; null means no window


def llama_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of LlamaForCausalLM."""
    return _traits(config, family="llama", window=None)


def mistral_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of MistralForCausalLM: `sliding_window` holds for every layer."""
    window = read_window(config, MISTRAL_WINDOW)
    return _traits(config, family="mistral", window=window)


def _traits(config: Mapping[str, Any], *, family: str, window: int | None) -> ModelTraits:
    bias = read.flag(config, "attention_bias", False)
    attention = read_heads(config, qkv_bias=bias, output_bias=bias)
    layers = read.whole(config, "num_hidden_layers")
    kind = FULL if window is None else SLIDING
    return read_traits(
        config,
        family=family,
        attention=attention,
        layers=read_layers(
            {"num_hidden_layers": layers}, window=window, default_kinds=[kind] * layers
        ),
        mlp_bias=read.flag(config, "mlp_bias", False),
    )
