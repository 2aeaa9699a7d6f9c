"""Reading of config.json: both spellings, derived values, refusals."""

from typing import Any

import pytest

from headrace.base.errors import CheckpointError, HeadraceError, UnsupportedError
from headrace.config.persona import KvKind, ModelTraits, MoeTraits
from headrace.models import config_reader as read
from headrace.models.registry import FAMILIES, family_of, read_model_traits

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    merged = LLAMA | {"architectures": [architecture]} | changes
    return {key: value for key, value in merged.items() if value != "absent"}


def gemma(**changes: Any) -> dict[str, Any]:
    return config("Gemma3ForCausalLM", **changes)


def windows(traits: ModelTraits) -> list[int | None]:
    return [layer.window for layer in traits.layers]


def test_defaults_of_llama() -> None:
    traits = read_model_traits(config())
    assert (traits.family, traits.dtype, traits.activation) == ("llama", "float32", "silu")
    assert traits.attention.head_dim == 10
    assert traits.attention.scale == 10**-0.5
    assert not traits.tie_word_embeddings
    assert traits.ropes["default"].theta == 10_000.0
    assert [group.name for group in traits.kv_groups] == ["full"]


@pytest.mark.parametrize("unset", ["absent", None, 0])
def test_unset_is_spelled_in_three_ways(unset: Any) -> None:
    traits = read_model_traits(config(head_dim=unset, num_key_value_heads=unset))
    assert (traits.attention.head_dim, traits.attention.num_kv_heads) == (10, 6)


SPELLINGS = {
    "default": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    ),
    "yarn": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "truncate": False,
            },
        },
        {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16,
            "truncate": False,
        },
    ),
    "longrope": (
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "su", "short_factor": [1] * 5, "long_factor": [2] * 5},
        },
        {
            "rope_type": "longrope",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 32,
            "short_factor": [1] * 5,
            "long_factor": [2] * 5,
        },
    ),
    "partial": (
        {"rope_theta": 5e5, "partial_rotary_factor": 0.4},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.4},
    ),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_ropes_are_read_in_both_spellings(kind: str) -> None:
    version4, version5 = SPELLINGS[kind]
    old = read_model_traits(config(**version4))
    assert old == read_model_traits(config(rope_parameters=version5))
    assert old.ropes["default"].theta == 5e5
    if "rope_scaling" in version4 and "type" in version4["rope_scaling"]:
        section = dict(version4["rope_scaling"])
        renamed = version4 | {"rope_scaling": section | {"rope_type": section.pop("type")}}
        assert old == read_model_traits(config(**renamed))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "original_max_position_embeddings": 16}, 64),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            64,
        ),
    ],
)
def test_the_context_follows_the_rope(scaling: dict[str, Any] | None, length: int) -> None:
    assert read_model_traits(config(rope_scaling=scaling)).max_position == length


def test_gemma3_ropes_in_both_spellings() -> None:
    old = gemma(
        rope_theta=1e6,
        rope_local_base_freq=1e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    new = gemma(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        layer_types=["sliding_attention", "full_attention"],
    )
    traits = read_model_traits(old)
    assert traits == read_model_traits(new)
    assert {name: (rope.kind, rope.theta) for name, rope in traits.ropes.items()} == {
        "global": ("linear", 1e6),
        "local": ("default", 1e3),
    }
    assert [layer.rope for layer in traits.layers] == ["local", "global"]
    assert traits.max_position == 64  # Gemma states the stretched length


def test_gemma3_defaults() -> None:
    traits = read_model_traits(gemma(num_hidden_layers=12, sliding_window=16))
    assert windows(traits) == [16] * 5 + [None] + [16] * 5 + [None]
    assert (traits.attention.head_dim, traits.attention.scale) == (256, 256**-0.5)
    assert traits.activation == "gelu_pytorch_tanh"
    assert traits.tie_word_embeddings
    assert traits.embedding_scale == 60**0.5
    assert traits.norm_offset == 1.0
    assert [(group.name, group.kind) for group in traits.kv_groups] == [
        ("window", KvKind.WINDOW),
        ("full", KvKind.FULL),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 16}, [16, 16]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 0}, [None, None]),
        ({}, [4096, 4096]),
    ],
)
def test_mistral_windows(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read_model_traits(config("MistralForCausalLM", **changes))) == expected


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 16, "max_window_layers": 1}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16]),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, [16, 16]),
        ({"use_sliding_window": True, "sliding_window": 16}, [None, None]),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [16, None],
        ),
        (
            {
                "use_sliding_window": False,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [None, None],
        ),
    ],
)
def test_qwen_windows(
    architecture: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(read_model_traits(config(architecture, **changes))) == expected


def experts(**changes: Any) -> dict[str, Any]:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    return config("Qwen3MoeForCausalLM", head_dim=16, **sizes | changes)


def test_experts_in_both_spellings_and_their_defaults() -> None:
    traits = read_model_traits(experts())
    assert traits == read_model_traits(experts(num_experts="absent", num_local_experts=8))
    assert traits.moe == MoeTraits(
        num_experts=8, num_experts_per_tok=2, intermediate_size=20, norm_topk_prob=False
    )
    assert traits.moe_layers == (0, 1)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 3}, (2,)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (0, 1, 2, 3)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read_model_traits(experts(num_hidden_layers=4, **changes)).moe_layers == layers


def test_a_window_beside_experts_holds_for_all_layers() -> None:
    slides = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert windows(read_model_traits(experts(**slides))) == [16, 16]
    assert windows(read_model_traits(experts(sliding_window=16))) == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": "absent"}, "has no num_local_experts"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"moe_intermediate_size": "many"}, "moe_intermediate_size .* is 'many'"),
        ({"num_experts_per_tok": 9}, "8 experts and 9 for each token"),
        ({"norm_topk_prob": 1}, "norm_topk_prob .* true or false"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers .* a list of numbers"),
    ],
)
def test_a_bad_value_of_experts_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_traits(experts(**changes))


def test_llama_takes_no_window_from_a_stray_key() -> None:
    traits = read_model_traits(config(sliding_window=16, layer_types=["sliding_attention"] * 2))
    assert windows(traits) == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "has no hidden_size"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "60"}, "hidden_size in the model's config is '60'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers .* is 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers .* is True"),
        ({"num_hidden_layers": -2}, "num_hidden_layers .* is -2"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps .* is 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .* is nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps .* is 1000"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, float("inf")]}},
            "short_factor .* a list of numbers, all of them finite",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings .* is 1. It must be true or false"),
        ({"hidden_act": 3}, "hidden_act .* is 3"),
        ({"rope_scaling": "yarn"}, "rope_scaling .* is 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "no low_freq_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1, 2],
                    "long_factor": [1, 2],
                }
            },
            "short_factor .* has 2 numbers. The rope has 5 frequencies",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, "2"]}}, "a list of num"),
        ({"partial_rotary_factor": 0.5}, "rotates 5 of 10 dimensions"),
        ({"partial_rotary_factor": 2.0}, "rotates 20 of 10 dimensions"),
        ({"num_key_value_heads": 4}, "6 attention heads and 4 key-value heads"),
        ({"architectures": "LlamaForCausalLM"}, "architectures .* a list of strings"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_traits(config(**changes))


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention"]])
def test_bad_layer_types_are_named(kinds: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types .* 2 entries are needed"):
        read_model_traits(config("Qwen3ForCausalLM", layer_types=kinds))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"architectures": None, "model_type": None}, "'' is not supported"),
        (
            {"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}},
            "type 'mine'. brings its own code, which is never run",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"quantization_config": {"bits": 4}}, "quantised with 'unknown'"),
        ({"hidden_act": "snake"}, "'snake' .* is not supported"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "'spiral' is not supported"),
        ({"dtype": "float64"}, "'float64' are not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_model_traits(config(**changes))
    assert "Supported" in caught.value.remedy


@pytest.mark.parametrize("key", ["is_causal", "use_bidirectional_attention"])
@pytest.mark.parametrize("make", [config, gemma])
def test_bidirectional_attention_is_refused(make: Any, key: str) -> None:
    """vLLM#14609: gte-Qwen2 says so with is_causal, and its embeddings were causal in silence."""
    wrong = {"is_causal": False, "use_bidirectional_attention": True}[key]
    with pytest.raises(UnsupportedError, match="bidirectional"):
        read_model_traits(make(**{key: wrong}))
    read_model_traits(make(**{key: not wrong}))


def test_the_refusal_lists_every_family() -> None:
    with pytest.raises(HeadraceError) as caught:
        family_of({"architectures": ["Other"]})
    assert all(family.architecture in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_either_name(family: Any) -> None:
    assert family_of({"architectures": [family.architecture]}) is family
    assert family_of({"model_type": family.model_type}) is family


def test_a_known_type_may_carry_an_auto_map() -> None:
    """Uploaders leave `auto_map` behind; the model is ours to build all the same."""
    assert read_model_traits(config(auto_map={"AutoConfig": "c.C"})).family == "llama"


def test_whole_floats_count_as_whole_numbers() -> None:
    assert read.whole({"n": 4.0}, "n") == 4


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(key: str) -> None:
    assert read_model_traits(config(**{key: "bfloat16"})).dtype == "bfloat16"
