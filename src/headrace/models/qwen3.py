"""Qwen3, dense (Qwen team, 2025): Llama with a norm on each head's q and k."""

from collections.abc import Mapping
from typing import Any

from headrace.config.persona import ModelTraits
from headrace.models import config_reader as read
from headrace.models.family_config import read_heads, read_traits
from headrace.models.qwen2 import qwen_layers


def qwen3_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of Qwen3ForCausalLM; a head has 128 dimensions unless the config says more."""
    bias = read.flag(config, "attention_bias", False)
    attention = read_heads(
        config, default_head_dim=128, qk_norm=True, qkv_bias=bias, output_bias=bias
    )
    return read_traits(
        config,
        family="qwen3",
        attention=attention,
        layers=qwen_layers(config),
    )
