"""The tiny models of the parity tests, and the ways to break each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reference_models import CONTEXT, Case

from headrace.config.persona import ModelTraits, RopeTraits

WINDOW = 16


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def yarn(**parameters: Any) -> dict[str, Any]:
    return rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT, **parameters)


LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[1.0 + 0.8 * i for i in range(8)],
    factor=4.0,
    original_max_position_embeddings=CONTEXT,
)
LLAMA3 = rope(
    "llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=CONTEXT,
)
GEMMA = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
}
EXPERTS = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}

CASES = {
    case.name: case
    for case in (
        Case(name="llama", family="llama", config={"tie_word_embeddings": True}),
        Case(
            name="llama-biased",
            family="llama",
            config={"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3},
        ),
        Case(
            name="llama-one-kv-head",
            family="llama",
            config={"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24},
        ),
        Case(
            name="llama-derived-head",
            family="llama",
            config={
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": None,
            },
        ),
        Case(name="llama-linear", family="llama", config=rope("linear", factor=4.0)),
        Case(
            name="llama-dynamic-within",
            family="llama",
            config=rope("dynamic", factor=2.0),
            max_model_len=48,
            hold=True,
        ),
        Case(
            name="llama-dynamic-past",
            family="llama",
            config=rope("dynamic", factor=2.0),
            hold=True,
        ),
        Case(name="llama-yarn", family="llama", config=yarn()),
        Case(
            name="llama-yarn-mscale",
            family="llama",
            config=yarn(mscale=1.0, mscale_all_dim=0.5, truncate=False, beta_fast=4, beta_slow=2),
        ),
        Case(name="llama-yarn-factor", family="llama", config=yarn(attention_factor=0.7)),
        Case(name="llama-llama3", family="llama", config=LLAMA3),
        Case(
            name="llama-longrope-within",
            family="llama",
            config=LONGROPE,
            max_model_len=48,
            hold=True,
        ),
        Case(name="llama-longrope-past", family="llama", config=LONGROPE, hold=True),
        Case(
            name="llama-partial",
            family="llama",
            config=rope("default", partial_rotary_factor=0.5),
            rotary_dim=8,
        ),
        Case(name="mistral-window", family="mistral", config={"sliding_window": WINDOW}),
        Case(name="mistral-no-window", family="mistral", config={"sliding_window": None}),
        Case(name="qwen2", family="qwen2", config={"num_key_value_heads": 3}),
        Case(
            name="qwen2-window",
            family="qwen2",
            config={
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 1,
            },
        ),
        Case(name="qwen3", family="qwen3", config={"tie_word_embeddings": True}),
        Case(
            name="qwen3-window-yarn",
            family="qwen3",
            config={
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
                **yarn(),
            },
        ),
        Case(
            name="qwen3-moe",
            family="qwen3_moe",
            config=EXPERTS | {"norm_topk_prob": True, "tie_word_embeddings": True},
        ),
        Case(
            name="qwen3-moe-mixed",
            family="qwen3_moe",
            config=EXPERTS
            | {
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
            },
        ),
        Case(name="gemma3", family="gemma3", config=GEMMA | {"final_logit_softcapping": 2.0}),
        Case(
            name="gemma3-capped-attention",
            family="gemma3",
            config=GEMMA | {"attn_logit_softcapping": 1.0, "num_key_value_heads": 3},
            soft_cap=1.0,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """One trait of one case made wrong; `length` settles the rope for another length."""

    case: str
    trait: str
    change: Callable[[ModelTraits], ModelTraits]
    length: int | None = None


def _traits(**changes: Any) -> Callable[[ModelTraits], ModelTraits]:
    return lambda traits: replace(traits, **changes)


def _attention(**changes: Any) -> Callable[[ModelTraits], ModelTraits]:
    return lambda traits: replace(traits, attention=replace(traits.attention, **changes))


def _rope(name: str = "default", **changes: Any) -> Callable[[ModelTraits], ModelTraits]:
    return lambda traits: replace(
        traits, ropes=traits.ropes | {name: replace(traits.ropes[name], **changes)}
    )


def _window(change: int | None) -> Callable[[ModelTraits], ModelTraits]:
    def broken(traits: ModelTraits) -> ModelTraits:
        layers = tuple(
            layer
            if layer.window is None
            else replace(layer, window=None if change is None else layer.window + change)
            for layer in traits.layers
        )
        return replace(traits, layers=layers)

    return broken


def _moe(**changes: Any) -> Callable[[ModelTraits], ModelTraits]:
    def broken(traits: ModelTraits) -> ModelTraits:
        assert traits.moe is not None
        return replace(traits, moe=replace(traits.moe, **changes))

    return broken


def _moe_layers(*places: int) -> Callable[[ModelTraits], ModelTraits]:
    return lambda traits: replace(
        traits,
        layers=tuple(
            replace(layer, is_moe=place in places) for place, layer in enumerate(traits.layers)
        ),
    )


def _first_layer_full(traits: ModelTraits) -> ModelTraits:
    """Which layers slide is mixed up."""
    first, second, *rest = traits.layers
    return replace(
        traits,
        layers=(
            replace(first, window=second.window, kv_group=second.kv_group),
            replace(second, window=first.window, kv_group=first.kv_group),
            *rest,
        ),
    )


def _swap_ropes(traits: ModelTraits) -> ModelTraits:
    ropes: dict[str, RopeTraits] = traits.ropes
    return replace(traits, ropes={"global": ropes["local"], "local": ropes["global"]})


BREAKAGES = tuple(
    Breakage(case=case, trait=trait, change=change, length=length)
    for case, trait, change, length in (
        ("llama", "tied head", _traits(tie_word_embeddings=False), None),
        ("llama", "norm eps", _traits(norm_eps=1e-6), None),
        ("llama", "norm offset", _traits(norm_offset=1.0), None),
        ("llama", "rope theta", _rope(theta=11_000.0), None),
        ("llama", "scale", _attention(scale=0.3), None),
        ("llama", "activation", _traits(activation="gelu"), None),
        ("llama-biased", "qkv bias", _attention(qkv_bias=False), None),
        ("llama-biased", "output bias", _attention(output_bias=False), None),
        ("llama-biased", "mlp bias", _traits(mlp_bias=False), None),
        ("llama-biased", "untied head", _traits(tie_word_embeddings=True), None),
        ("llama-linear", "rope kind", _rope(kind="default"), None),
        ("llama-linear", "rope factor", _rope(factor=8.0), None),
        ("llama-dynamic-past", "rope kind", _rope(kind="default"), None),
        ("llama-dynamic-past", "rope length", _traits(), 512),
        ("llama-dynamic-within", "rope length", _traits(), 256),
        ("llama-yarn", "rope kind", _rope(kind="default"), None),
        ("llama-yarn", "rope is only linear", _rope(kind="linear"), None),
        ("llama-yarn", "attention factor", _rope(attention_factor=1.0), None),
        ("llama-yarn", "original context", _rope(original_max_position=4 * CONTEXT), None),
        ("llama-yarn-mscale", "mscale", _rope(mscale=None), None),
        ("llama-yarn-mscale", "truncation", _rope(truncate=True), None),
        ("llama-yarn-mscale", "beta fast", _rope(beta_fast=None), None),
        ("llama-yarn-mscale", "beta slow", _rope(beta_slow=None), None),
        ("llama-yarn-factor", "attention factor", _rope(attention_factor=None), None),
        ("llama-llama3", "rope kind", _rope(kind="default"), None),
        ("llama-llama3", "rope factor", _rope(factor=8.0), None),
        ("llama-llama3", "low frequency", _rope(low_freq_factor=2.0), None),
        ("llama-llama3", "high frequency", _rope(high_freq_factor=8.0), None),
        ("llama-longrope-within", "rope kind", _rope(kind="default"), None),
        ("llama-longrope-within", "rope length", _traits(), 256),
        ("llama-longrope-past", "rope kind", _rope(kind="default"), None),
        ("llama-longrope-past", "attention factor", _rope(attention_factor=1.0), None),
        ("llama-longrope-past", "long set", _rope(long_factor=(1.0,) * 8), None),
        ("llama-partial", "rotary dim", _rope(rotary_dim=16), None),
        ("mistral-window", "window off", _window(None), None),
        ("mistral-window", "window one too long", _window(1), None),
        ("mistral-window", "window one too short", _window(-1), None),
        ("qwen2", "qkv bias", _attention(qkv_bias=False), None),
        ("qwen2-window", "window off", _window(None), None),
        ("qwen2-window", "sliding layers", _first_layer_full, None),
        ("qwen3", "q/k norm", _attention(qk_norm=False), None),
        ("qwen3-window-yarn", "sliding layers", _first_layer_full, None),
        ("qwen3-window-yarn", "output bias", _attention(output_bias=False), None),
        ("qwen3-moe", "normed weights", _moe(norm_topk_prob=False), None),
        ("qwen3-moe", "experts of a token", _moe(num_experts_per_tok=2), None),
        ("qwen3-moe", "a dense layer", _moe_layers(0, 1, 3), None),
        ("qwen3-moe", "q/k norm", _attention(qk_norm=False), None),
        ("qwen3-moe", "activation", _traits(activation="gelu"), None),
        ("qwen3-moe-mixed", "normed weights", _moe(norm_topk_prob=True), None),
        ("qwen3-moe-mixed", "sparse step", _moe_layers(0, 2, 3), None),
        ("qwen3-moe-mixed", "dense layers", _moe_layers(1, 3), None),
        ("qwen3-moe-mixed", "window off", _window(None), None),
        ("qwen3-moe-mixed", "output bias", _attention(output_bias=False), None),
        ("gemma3", "norm offset", _traits(norm_offset=0.0), None),
        ("gemma3", "final soft cap", _traits(final_soft_cap=None), None),
        ("gemma3", "embedding scale", _traits(embedding_scale=None), None),
        ("gemma3", "query scalar", _attention(scale=0.25), None),
        ("gemma3", "q/k norm", _attention(qk_norm=False), None),
        ("gemma3", "ropes swapped", _swap_ropes, None),
        ("gemma3", "global rope kind", _rope("global", kind="default"), None),
        ("gemma3", "window off", _window(None), None),
        ("gemma3", "activation", _traits(activation="silu"), None),
        ("gemma3-capped-attention", "attention soft cap", _attention(soft_cap=None), None),
    )
)
