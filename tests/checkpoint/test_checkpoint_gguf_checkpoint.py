"""GGUF files read back in Hugging Face terms."""

import gguf
import numpy as np
import pytest
import torch
from checkpoint_builders import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    TOKENS,
    VOCABULARY,
    WIDE,
    random_weights,
    write_gguf,
)
from gguf import quants

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint import open_checkpoint

FAMILY_WEIGHTS = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3": {"qk_norm": True, "four_norms": True},
}


def make(tmp_path, architecture="llama", weights=None, **options):
    weights = random_weights(**FAMILY_WEIGHTS[architecture]) if weights is None else weights
    path = write_gguf(tmp_path / "tiny.gguf", weights, architecture=architecture, **options)
    return open_checkpoint(path), weights


@pytest.mark.parametrize("architecture", FAMILY_WEIGHTS)
def test_every_tensor_comes_back_under_its_name(tmp_path, architecture):
    checkpoint, weights = make(tmp_path, architecture)
    assert set(checkpoint.tensors) == set(weights)
    for name, expected in weights.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            assert torch.allclose(tensor, expected, atol=1e-6), name  # 1 + w was rounded
        else:
            assert torch.equal(tensor, expected), name
        entry = checkpoint.tensors[name]
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(expected.shape), "F32")
        assert (entry.file, entry.nbytes) == (checkpoint.path, expected.numel() * 4)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_stored_types(tmp_path, dtype):
    checkpoint, weights = make(
        tmp_path,
        dtypes=dict.fromkeys([name for name in random_weights() if "_proj" in name], dtype),
    )
    kind = gguf.GGMLQuantizationType[dtype]
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        packed = quants.quantize(weights[name].numpy(), kind)
        expected = torch.from_numpy(quants.dequantize(packed, kind).astype(np.float32))
        tensor = checkpoint.read(name)
        assert tensor.dtype == plain.get(dtype, torch.float32)
        assert torch.equal(tensor.float(), expected)
        assert checkpoint.tensors[name].dtype == dtype
        assert checkpoint.tensors[name].shape == tuple(expected.shape)
        assert checkpoint.tensors[name].nbytes == packed.nbytes


def test_reading_does_not_touch_the_file(tmp_path):
    checkpoint, _ = make(tmp_path)
    before = checkpoint.path.read_bytes()
    checkpoint.read("model.norm.weight").zero_()
    assert checkpoint.path.read_bytes() == before
    assert checkpoint.read("model.norm.weight").abs().sum() > 0


def test_llama_bias_of_q_and_k_is_put_back_too(tmp_path):
    checkpoint, weights = make(tmp_path, weights=random_weights(bias=True))
    for part in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{part}_proj.bias"
        assert torch.equal(checkpoint.read(name), weights[name])
    assert checkpoint.config["attention_bias"] is True


def test_llama_config(tmp_path):
    checkpoint, _ = make(tmp_path)
    assert dict(checkpoint.config) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": pytest.approx(1e-5),
        "tie_word_embeddings": True,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation_config == {}


def test_config_of_the_other_families(tmp_path):
    qwen2, _ = make(tmp_path, "qwen2")
    assert qwen2.config["model_type"] == "qwen2"
    assert qwen2.config["attention_bias"] is True
    qwen3, _ = make(tmp_path, "qwen3", keys={"qwen3.attention.key_length": HEAD_DIM})
    assert qwen3.config["architectures"] == ["Qwen3ForCausalLM"]
    assert qwen3.config["head_dim"] == HEAD_DIM
    gemma, _ = make(tmp_path, "gemma3", keys={"gemma3.final_logit_softcapping": 30.0})
    expected = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": None,
    }
    assert {name: gemma.config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (2, ["sliding_attention", "full_attention"]),
        ([False, True], ["full_attention", "sliding_attention"]),
    ],
)
def test_gemma3_window_pattern(tmp_path, pattern, expected):
    keys = {"gemma3.attention.sliding_window_pattern": pattern}
    checkpoint, _ = make(tmp_path, "gemma3", keys=keys)
    assert checkpoint.config["layer_types"] == expected


def test_mistral_is_llama_with_a_window(tmp_path):
    checkpoint, _ = make(tmp_path, keys={"llama.attention.sliding_window": 16})
    assert checkpoint.config["model_type"] == "mistral"
    assert checkpoint.config["sliding_window"] == 16


def test_a_window_whose_layers_are_unknown(tmp_path):
    with pytest.raises(UnsupportedError, match="sliding window in a file of architecture qwen2"):
        make(tmp_path, "qwen2", keys={"qwen2.attention.sliding_window": 16})
    keys = {"llama.attention.sliding_window": 16, "llama.attention.sliding_window_pattern": 2}
    with pytest.raises(UnsupportedError, match="sliding window in a file of architecture llama"):
        make(tmp_path, keys=keys)


@pytest.mark.parametrize(("keys", "said"), [({}, None), ({"llama.attention.causal": False}, False)])
def test_attention_that_is_not_causal_is_told(tmp_path, keys, said):
    checkpoint, _ = make(tmp_path, keys=keys)
    assert checkpoint.config.get("is_causal") is said


@pytest.mark.parametrize(("kind", "stated"), [(None, None), (0, None), (1, "mean"), (3, "last")])
def test_pooling_that_the_file_states(tmp_path, kind, stated):
    keys = {} if kind is None else {"llama.pooling_type": kind}
    assert make(tmp_path, keys=keys)[0].pooling == stated


def test_untied_head(tmp_path):
    weights = random_weights() | {"lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}
    checkpoint, _ = make(tmp_path, weights=weights)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.read("lm_head.weight"), weights["lm_head.weight"])


def test_a_tensor_of_no_known_name_keeps_its_own(tmp_path):
    checkpoint, _ = make(tmp_path, extra={"blk.0.surprise.weight": np.ones(4, np.float32)})
    assert checkpoint.tensors["blk.0.surprise.weight"].shape == (4,)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 1.0}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 32,
                "yarn_attn_factor": 1.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, expected):
    keys = {f"llama.rope.scaling.{name}": value for name, value in keys.items()}
    checkpoint, _ = make(tmp_path, keys=keys)
    assert checkpoint.config.get("rope_scaling") == expected


def test_partial_rope(tmp_path):
    checkpoint, _ = make(tmp_path, keys={"llama.rope.dimension_count": HEAD_DIM // 2})
    assert checkpoint.config["partial_rotary_factor"] == 0.5


def test_stored_rope_factors_give_the_frequencies_of_llama3(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = {"hidden_size": HIDDEN, "num_attention_heads": 4, "max_position_embeddings": 128}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**shape, rope_parameters=llama3), "cpu")
    plain = 5000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert not torch.allclose(plain, wanted, rtol=1e-3)
    checkpoint, _ = make(tmp_path, extra={"rope_freqs.weight": (plain / wanted).numpy()})
    assert "rope_freqs.weight" not in checkpoint.tensors
    scaling = checkpoint.config["rope_scaling"] | {"rope_theta": 5000.0}
    given, attention = ROPE_INIT_FUNCTIONS["longrope"](
        LlamaConfig(**shape, rope_parameters=scaling), "cpu"
    )
    assert attention == 1.0
    assert torch.allclose(given, wanted, rtol=1e-6)
    given_long, _ = ROPE_INIT_FUNCTIONS["longrope"](
        LlamaConfig(**shape, rope_parameters=scaling), "cpu", seq_len=1000
    )
    assert torch.equal(given_long, given)


def test_long_and_short_rope_factors(tmp_path):
    half = HEAD_DIM // 2
    checkpoint, _ = make(
        tmp_path,
        keys={
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.attn_factor": 1.25,
            "llama.rope.scaling.original_context_length": 32,
        },
        extra={
            "rope_factors_long.weight": np.full(half, 4, np.float32),
            "rope_factors_short.weight": np.full(half, 2, np.float32),
        },
    )
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [2.0] * half,
        "long_factor": [4.0] * half,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 32,
    }


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"split.count": 3}, UnsupportedError, "one of 3 parts.*merge"),
        ({"general.type": "adapter"}, UnsupportedError, "GGUF adapter"),
        (
            {"general.architecture": "mamba"},
            UnsupportedError,
            "mamba.*llama, qwen2, qwen3, qwen3moe, g",
        ),
        ({"llama.expert_count": 8}, UnsupportedError, "mixture of experts"),
        ({"llama.attention.value_length": 8}, UnsupportedError, "16 for keys and 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedError, "head_count_kv differs"),
        ({"llama.rope.scaling.type": "magic"}, UnsupportedError, "magic.*linear, yarn"),
        ({"llama.rope.scaling.alpha": 2.0}, UnsupportedError, r"rope.scaling.alpha is unknown"),
        ({"llama.rope.scaling.type": "yarn"}, CheckpointError, r"lacks .*rope.scaling.factor"),
        ({"llama.rope.scaling.type": "longrope"}, CheckpointError, "lacks rope_factors_long"),
        ({"llama.block_count": 0}, CheckpointError, "block_count is 0"),
        ({"llama.block_count": 2**31}, CheckpointError, "block_count is 2147483648"),
    ],
)
def test_refused_metadata(tmp_path, keys, error, message):
    with pytest.raises(error, match=message) as caught:
        make(tmp_path, keys=keys)
    assert "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drop": ("llama.embedding_length",)}, CheckpointError, r"key llama.embedding_length"),
        ({"drop": ("llama.context_length",)}, CheckpointError, r"key llama.context_length"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float16)}}, UnsupportedError, "F16"),
    ],
)
def test_refusals(tmp_path, options, error, message):
    with pytest.raises(error, match=message) as caught:
        make(tmp_path, **options)
    assert "tiny.gguf" in str(caught.value)


def test_missing_embedding_and_wrong_rows(tmp_path):
    weights = random_weights()
    del weights["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"lacks the tensor token_embd\.weight"):
        make(tmp_path, weights=weights)
    odd = {"blk.0.attn_q.bias": np.ones(6, np.float32)}
    checkpoint, _ = make(tmp_path, extra=odd)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias has 6 rows.*4 heads"):
        checkpoint.read("model.layers.0.self_attn.q_proj.bias")


def test_a_packed_bias_cannot_be_reordered(tmp_path):
    weights = random_weights(bias=True)
    name = "model.layers.0.self_attn.q_proj.bias"
    checkpoint, _ = make(tmp_path, weights=weights, dtypes={name: "Q8_0"})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is one row of Q8_0"):
        checkpoint.read(name)


def test_tokenizer_source(tmp_path):
    checkpoint, _ = make(tmp_path)
    source = checkpoint.tokenizer_source
    assert source.gguf.tokens == tuple(TOKENS)
    assert (source.gguf.model, source.gguf.pre) == ("gpt2", "smollm")
    assert source.gguf.merges == ("t 1", "t 2")
    assert source.gguf.scores == ()
    assert source.gguf.token_types[:5] == (2, 3, 3, 3, 1)
    assert source.gguf.add_bos_token is True
    assert source.gguf.add_eos_token is None
    named = (source.gguf.bos_token_id, source.gguf.eos_token_id)
    assert [source.gguf.tokens[token] for token in named] == ["<s>", "</s>"]
    assert source.chat_template == "{{ messages }}"
    assert source.tokenizer_json is None
    # The file names no end-of-turn token, so <|im_end|> (3) is found by its text.
    assert source.eos_token_ids == (2, 3)


def test_end_tokens_named_by_the_file(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    checkpoint, _ = make(tmp_path, keys=keys)
    assert checkpoint.tokenizer_source.eos_token_ids == (2, 3, 7, 9)  # 3 is called <|im_end|>


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"])
def test_end_tokens_that_only_their_names_tell(tmp_path, name):
    """Qwen and Llama 3: the lists of their generation_config.json are not in the file."""
    tokens, kinds = [*TOKENS[:-2], name, name], [2, 3, 3, 3] + [1] * 34 + [3, 1]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    checkpoint, _ = make(tmp_path, keys=keys)
    assert checkpoint.tokenizer_source.eos_token_ids == (2, 3, 38)


def test_cache_key_follows_the_content(tmp_path):
    first, _ = make(tmp_path)
    key = first.tokenizer_source.cache_key
    again = open_checkpoint(first.path.rename(tmp_path / "moved.gguf"))
    assert again.tokenizer_source.cache_key == key
    other, _ = make(tmp_path, keys={"tokenizer.ggml.tokens": [*TOKENS[:-1], "new"]})
    assert other.tokenizer_source.cache_key != key


def test_a_file_without_tokenizer(tmp_path):
    checkpoint, _ = make(tmp_path, tokenizer=False)
    assert checkpoint.tokenizer_source is None


def test_a_vocabulary_without_its_merges(tmp_path):
    """ollama#7038: converters passed over merges that transformers 4.45 wrote as pairs."""
    checkpoint, _ = make(tmp_path, drop=("tokenizer.ggml.merges",))
    with pytest.raises(CheckpointError, match=r"lacks the metadata key tokenizer\.ggml\.merges"):
        _ = checkpoint.tokenizer_source


def test_token_lists_of_different_lengths(tmp_path):
    checkpoint, _ = make(tmp_path, keys={"tokenizer.ggml.token_type": [1, 1]})
    with pytest.raises(CheckpointError, match="40 tokens but 2 token_types"):
        _ = checkpoint.tokenizer_source
