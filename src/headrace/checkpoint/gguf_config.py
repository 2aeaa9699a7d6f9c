"""GGUF metadata turned into the keys of a Hugging Face config.json.

Facts about the keys: the GGUF specification and the converter of ggml-org/llama.cpp; about the
values a model type wants: its configuration class in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_keys import ArchitectureKeys
from headrace.checkpoint.gguf_rope import rope_keys
from headrace.checkpoint.json_shapes import MOST_LAYERS


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """What a `general.architecture` is called in config.json."""

    model_type: str
    architecture: str


GGUF_FAMILIES = {
    "llama": GgufFamily(model_type="llama", architecture="LlamaForCausalLM"),
    "qwen2": GgufFamily(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": GgufFamily(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM"),
    "gemma3": GgufFamily(model_type="gemma3_text", architecture="Gemma3ForCausalLM"),
}

_WITH_EXPERTS = frozenset({"qwen3moe"})

# Gemma 3 files do not store these; llama.cpp holds them as constants of the family.
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_WINDOW_PERIOD = 6
_GEMMA3_27B_LAYERS = 62


def gguf_architecture(file: GgufFile) -> str:
    """The file's architecture; UnsupportedError with the supported ones for any other."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{file.path} lacks the metadata key general.architecture")
    supported = f"Supported GGUF architectures: {', '.join(GGUF_FAMILIES)}"
    if architecture not in GGUF_FAMILIES:
        raise UnsupportedError(
            f"{file.path} holds a model of architecture {architecture}", remedy=supported
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError(f"{file.path} holds a GGUF {kind}, not a model", remedy=supported)
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a split GGUF file",
            remedy="Join them with llama-gguf-split --merge",
        )
    has_experts = file.metadata.get(f"{architecture}.expert_count", 0) > 0
    if has_experts and architecture not in _WITH_EXPERTS:
        raise UnsupportedError(
            f"{file.path} holds a mixture of experts of architecture {architecture}",
            remedy=supported + ", without experts",
        )
    return architecture


def gguf_config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """config.json keys of a supported file (rope in the flat form: rope_theta, rope_scaling)."""
    family = GGUF_FAMILIES[architecture]
    keys = ArchitectureKeys(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    heads = keys.count("attention.head_count")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count", most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": (
            heads
            if keys.get("attention.head_count_kv") is None
            else keys.count("attention.head_count_kv")
        ),
        "head_dim": _head_dim(file, keys, heads),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.require("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config |= rope_keys(file, keys, head_dim=config["head_dim"])
    if architecture == "gemma3":
        config |= _gemma3_keys(keys, config)
    else:
        config |= _llama_keys(file, keys, architecture)
    if architecture in _WITH_EXPERTS:
        config |= _expert_keys(keys)
    if keys.get("attention.causal") is False:
        config["is_causal"] = False
    config |= _token_id_keys(file.metadata)
    return config


def _head_dim(file: GgufFile, keys: ArchitectureKeys, heads: int) -> int:
    query = file.tensors.get("blk.0.attn_q.weight")
    if keys.get("attention.key_length") is not None:
        head_dim = keys.count("attention.key_length")
    elif query is not None:  # what the weights say is surer than hidden_size / heads
        head_dim = query.shape[0] // heads
    else:
        head_dim = keys.count("embedding_length") // heads
    if keys.get("attention.value_length") not in (None, head_dim):
        raise UnsupportedError(
            f"{file.path}: heads of {head_dim} for keys and "
            f"{keys.get('attention.value_length')} for values",
            remedy="Supported: the same size for both",
        )
    return head_dim


def _llama_keys(file: GgufFile, keys: ArchitectureKeys, architecture: str) -> dict[str, Any]:
    """What Llama, Mistral, Qwen2 and Qwen3 share."""
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    window = keys.get("attention.sliding_window")
    if window:
        if architecture != "llama" or keys.get("attention.sliding_window_pattern") is not None:
            raise UnsupportedError(
                f"{file.path}: a sliding window in a file of architecture {architecture}",
                why="Which layers it holds for is not known",
                remedy="Supported: llama with the same window in all layers, and gemma3",
            )
        # Llama's own configuration knows no window; Mistral is Llama with one.
        config |= {
            "sliding_window": window,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
        }
    return config


def _expert_keys(keys: ArchitectureKeys) -> dict[str, Any]:
    """All layers have experts. That their weights sum to 1 is a constant of the family in llama.cpp
    where the file does not say it."""
    normed = keys.get("expert_weights_norm")
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True if normed is None else normed,
    }


def _gemma3_keys(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        windowed = [bool(flag) for flag in pattern]
    else:
        period = pattern or _GEMMA3_WINDOW_PERIOD
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    scale = keys.get("attention.scale")
    if scale:
        query_scalar = 1 / scale**2
    elif layers == _GEMMA3_27B_LAYERS:
        query_scalar = config["hidden_size"] // config["num_attention_heads"]
    else:
        query_scalar = config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        "rope_local_base_freq": keys.get("rope.freq_base_swa") or _GEMMA3_LOCAL_THETA,
        "query_pre_attn_scalar": query_scalar,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
    }


def _token_id_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    return {
        f"{short}_token_id": metadata[f"tokenizer.ggml.{name}_token_id"]
        for name, short in names.items()
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
