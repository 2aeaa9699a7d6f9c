"""Personas, machines and a short way to a plan for the tests of this room."""

from dataclasses import replace
from typing import Any

from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import GIB, Hardware, assumed_hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.runner.checkpoint_facts import CheckpointFacts
from headrace.runner.persona import persona_of
from headrace.runner.resolve import resolve

CPU = Hardware(
    name="test cpu", platform="cpu", memory_bytes=16 * GIB, units=4, packages=frozenset()
)
CPU_WITH_COMPILER = replace(CPU, packages=frozenset({"g++"}))
H100 = assumed_hardware("h100-80gb")
TURING = Hardware(
    name="t4",
    platform="cuda",
    capability=(7, 5),
    memory_bytes=15 * GIB,
    units=40,
    packages=frozenset({"triton"}),
    assumed=True,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "tie_word_embeddings": True,
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma3": GEMMA3,
}


def persona(config: dict[str, Any] = LLAMA, **changes: Any) -> Persona:
    return persona_of(config | changes)


def plan(
    model: Persona | None = None,
    hardware: Hardware = CPU,
    facts: CheckpointFacts | None = None,
    **asked: Any,
) -> Plan:
    return resolve(
        EngineConfig(model="tiny", **asked),
        model or persona(),
        hardware,
        checkpoint=facts or CheckpointFacts(load_format="safetensors", dtype="bfloat16"),
    )
