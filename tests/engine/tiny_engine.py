"""Engines over tiny checkpoints with seeded random weights and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.outputs import RequestOutput
from headrace.request.sampling_params import SamplingParams

VOCAB = 272  # 256 bytes, 8 specials, and a rest that no text uses
EOS = 257
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
CONFIGS = {"llama": LLAMA, "gemma": GEMMA, "moe": MOE}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_checkpoint(folder: Path, family: str, *, with_tokenizer: bool = True) -> Path:
    """A folder that `load_format="dummy"` turns into a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    if with_tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<s>", "</s>", *[f"<special{i}>" for i in range(6)]])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_engine(folder: Path, *, retract_every: int = 0, **options: Any) -> Engine:
    settings = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_running_requests": 16,
        "seed": 3,
    }
    config = EngineConfig(model=str(folder), **(settings | options))
    return Engine(config, retract_every=retract_every)


def run_all(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    """All prompts at the same time; checks that no page is lost."""
    handles = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()
    engine.scheduler.check_integrity()
    return [handle.output() for handle in handles]


def run_alone(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    """One prompt after the other."""
    return [
        run_all(engine, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)
    ]
