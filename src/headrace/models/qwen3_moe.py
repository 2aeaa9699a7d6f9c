"""Qwen3 with a mixture of experts (Qwen team, 2025): Qwen3 whose MLPs are routed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.base.errors import CheckpointError
from headrace.config.persona import LayerTraits, ModelTraits, MoeTraits
from headrace.models import config_reader as read
from headrace.models.family_config import (
    FULL,
    SLIDING,
    read_heads,
    read_layers,
    read_traits,
)
from headrace.models.qwen2 import qwen_window


def qwen3_moe_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of Qwen3MoeForCausalLM.

    Raises:
        CheckpointError: a key is missing, or of the wrong type or range.
    """
    bias = read.flag(config, "attention_bias", False)
    attention = read_heads(config, qk_norm=True, qkv_bias=bias, output_bias=bias)
    return read_traits(
        config,
        family="qwen3_moe",
        attention=attention,
        layers=_layers(config),
        moe=read_experts(config),
    )


def read_experts(config: Mapping[str, Any]) -> MoeTraits:
    """The experts of the layers that have some. Transformers writes their number under either of
    two names."""
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = read.whole(config, key)
    chosen = read.whole(config, "num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"The model's config has {experts} experts and {chosen} for each token",
            why="a token is given different experts",
        )
    return MoeTraits(
        num_experts=experts,
        num_experts_per_tok=chosen,
        intermediate_size=read.whole(config, "moe_intermediate_size"),
        norm_topk_prob=read.flag(config, "norm_topk_prob", False),
    )


def _layers(config: Mapping[str, Any]) -> tuple[LayerTraits, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but those in `mlp_only_layers`. A window,
    where it is used, holds for all layers."""
    window = qwen_window(config)
    count = read.whole(config, "num_hidden_layers")
    kinds = [FULL if window is None else SLIDING] * count
    step = read.whole(config, "decoder_sparse_step", 1)
    dense = read.numbers(config, "mlp_only_layers") or ()
    layers = read_layers(config, window=window, default_kinds=kinds)
    return tuple(
        replace(layer, is_moe=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    )
