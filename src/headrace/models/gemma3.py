"""Gemma 3, text (Gemma team, 2025).

Five sliding layers to one full layer, each kind with a rope of its own; norms before and after
each sublayer, whose stored weights are deviations from 1; normed q and k; a scaled embedding.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headrace.batch.forward_batch import ForwardBatch
from headrace.config.persona import ModelTraits, RopeTraits
from headrace.layers.attention import SelfAttention
from headrace.layers.rope import Rotation
from headrace.layers.weights import WeightSpace
from headrace.models import config_reader as read
from headrace.models.decoder import CausalDecoder, gated_mlp, norm
from headrace.models.family_config import (
    FULL,
    SLIDING,
    read_heads,
    read_layers,
    read_traits,
    read_window,
)
from headrace.models.rope_config import read_rope, rope_section

# transformers' values for a config that has no key
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
WINDOW, PATTERN, HEAD_DIM, QUERY_SCALAR = 4096, 6, 256, 256


class SandwichBlock(nn.Module):
    """norm, attention, norm, add, norm, MLP, norm, add."""

    def __init__(self, traits: ModelTraits, layer_id: int, *, space: WeightSpace) -> None:
        super().__init__()
        self.operators = space.operators
        self.self_attn = SelfAttention(traits, layer_id, space=space)
        self.mlp = gated_mlp(traits, space)
        self.input_layernorm = norm(traits, space)
        self.post_attention_layernorm = norm(traits, space)
        self.pre_feedforward_layernorm = norm(traits, space)
        self.post_feedforward_layernorm = norm(traits, space)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """The residual stream, [T, H] -> [T, H]"""
        attention, mlp = self.self_attn, self.mlp
        qkv, x = self.operators.normed_linear(self.input_layernorm, attention.qkv_proj, x)
        attended = attention.o_proj(attention.attend(qkv, rotation, batch))
        x = x + self.post_attention_layernorm(attended)
        gated, x = mlp.gate(self.pre_feedforward_layernorm, x)
        return x + self.post_feedforward_layernorm(mlp.down_proj(gated))  # type: ignore[no-any-return]


class Gemma3ForCausalLM(CausalDecoder):
    block = SandwichBlock


def gemma3_traits(config: Mapping[str, Any]) -> ModelTraits:
    """Config keys of Gemma3ForCausalLM (model type gemma3_text)."""
    attention = read_heads(
        config,
        default_head_dim=HEAD_DIM,
        scale=read.number(config, "query_pre_attn_scalar", QUERY_SCALAR) ** -0.5,
        soft_cap=read.optional_number(config, "attn_logit_softcapping"),
        qk_norm=True,
        qkv_bias=(bias := read.flag(config, "attention_bias", False)),
        output_bias=bias,
    )
    pattern = read.whole(config, "sliding_window_pattern", PATTERN)
    layers = read_layers(
        config,
        window=read_window(config, WINDOW),
        default_kinds=[
            SLIDING if (index + 1) % pattern else FULL
            for index in range(read.whole(config, "num_hidden_layers"))
        ],
        ropes={FULL: "global", SLIDING: "local"},
    )
    ropes = _ropes(config, attention.head_dim)
    used = {layer.rope for layer in layers}
    return read_traits(
        config,
        family="gemma3",
        attention=attention,
        layers=layers,
        ropes={name: rope for name, rope in ropes.items() if name in used},
        max_position=read.whole(config, "max_position_embeddings"),  # stretching included
        tied=True,
        act_key="hidden_activation",
        act="gelu_pytorch_tanh",
        norm_offset=1.0,
        final_soft_cap=read.optional_number(config, "final_logit_softcapping"),
        embedding_scale=read.whole(config, "hidden_size") ** 0.5,
    )


def _ropes(config: Mapping[str, Any], head_dim: int) -> dict[str, RopeTraits]:
    """Version 4 states the full layers' rope as usual and `rope_local_base_freq` for the sliding
    ones, which are never stretched; version 5 has an object for each kind of layer."""
    parameters = rope_section(config)
    if FULL in parameters or SLIDING in parameters:
        full = read.section(parameters, FULL) or {}
        sliding = read.section(parameters, SLIDING) or {}
    else:
        full = parameters
        sliding = {"rope_theta": read.number(config, "rope_local_base_freq", LOCAL_THETA)}
    return {
        "global": read_rope(config, full, head_dim=head_dim, theta=GLOBAL_THETA),
        "local": read_rope(config, sliding, head_dim=head_dim, theta=LOCAL_THETA),
    }
