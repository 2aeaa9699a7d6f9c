"""Tiny checkpoints on disk for the tests of this folder."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDE, VOCABULARY = 64, 2, 4, 2, 16, 96, 40
Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOKENS = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"t{index}" for index in range(36))]


def random_weights(*, qk_norm: bool = False, bias: bool = False, four_norms: bool = False):
    """float32 weights of a tiny model under Hugging Face names; norms around 1 + 0.1 x."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        weights[place + "input_layernorm.weight"] = normal(HIDDEN)
        weights[place + "post_attention_layernorm.weight"] = normal(HIDDEN)
        if four_norms:
            weights[place + "pre_feedforward_layernorm.weight"] = normal(HIDDEN)
            weights[place + "post_feedforward_layernorm.weight"] = normal(HIDDEN)
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{place}self_attn.{part}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN)
            if bias:
                weights[f"{place}self_attn.{part}_proj.bias"] = normal(rows * HEAD_DIM)
            if qk_norm and part != "v":
                weights[f"{place}self_attn.{part}_norm.weight"] = normal(HEAD_DIM)
        weights[place + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        weights[place + "mlp.gate_proj.weight"] = normal(WIDE, HIDDEN)
        weights[place + "mlp.up_proj.weight"] = normal(WIDE, HIDDEN)
        weights[place + "mlp.down_proj.weight"] = normal(HIDDEN, WIDE)
    weights["model.norm.weight"] = normal(HIDDEN)
    return weights


def gguf_name(name: str, architecture: str) -> str:
    """Hugging Face name to GGUF name, by the table of the gguf package."""
    kind = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma3": "GEMMA3"}[architecture]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], LAYERS)
    stem, suffix = name.rsplit(".", 1)
    found = table.get_name(stem)
    assert found is not None, name
    return f"{found}.{suffix}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k of llama files: the two rope halves interleaved."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + part * half + index
             for head in range(heads) for index in range(half) for part in range(2)]  # fmt: skip
    return rows[order]


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    *,
    architecture: str = "llama",
    dtypes: dict[str, str] | None = None,
    keys: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> Path:
    """A GGUF file as a converter makes it.

    Args:
        dtypes: HF name -> GGUF type name; F32 for all others.
        keys: metadata set over the defaults; a name without a dot-free prefix is taken whole.
        drop: metadata left out.
        extra: tensors under GGUF names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {
        f"{architecture}.{name}": value
        for name, value in {
            "block_count": LAYERS,
            "context_length": 128,
            "embedding_length": HIDDEN,
            "feed_forward_length": WIDE,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 5000.0,
        }.items()
    }
    if architecture == "gemma3":
        metadata["gemma3.attention.sliding_window"] = 8
        metadata["gemma3.attention.key_length"] = HEAD_DIM
    if tokenizer:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [2, 3, 3, 3] + [1] * 36,
            "tokenizer.ggml.merges": ["t 1", "t 2"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ messages }}",
        }
    for key, value in (metadata | (keys or {})).items():
        if key not in drop:
            _add(writer, key, value)
    for name, tensor in weights.items():
        _add_tensor(writer, name, tensor, architecture, (dtypes or {}).get(name, "F32"))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, architecture: str, dtype: str
) -> None:
    array = tensor.float().numpy()
    if architecture == "llama" and ".q_proj." in name:
        array = interleave(array, HEADS)
    if architecture == "llama" and ".k_proj." in name:
        array = interleave(array, KV_HEADS)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        array = array + np.float32(1)
    kind = gguf.GGMLQuantizationType[dtype]
    packed = gguf.quants.quantize(array, kind)
    raw = None if dtype in ("F32", "F16") else kind
    writer.add_tensor(gguf_name(name, architecture), packed, raw_dtype=raw)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "eos_token_id": 2,
}


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def write_folder(
    folder: Path,
    weights: dict[str, torch.Tensor],
    *,
    config: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A Hugging Face folder; more than one shard come with their index."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", CONFIG | (config or {}))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder
