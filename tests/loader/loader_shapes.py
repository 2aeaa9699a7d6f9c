"""The shape of this folder's tiny models, and empty ones."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.config.plan import RopePlan
from headrace.models.decoder import CausalDecoder
from headrace.models.registry import build_model, read_model_traits

VOCAB = 272
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}


def make_model(
    config: Mapping[str, Any], *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> CausalDecoder:
    """A tree whose parameters hold anything."""
    traits = read_model_traits(CONFIG | config)
    ropes = {name: RopePlan(traits=rope, length=128) for name, rope in traits.ropes.items()}
    return build_model(traits, ropes, dtype, device)
