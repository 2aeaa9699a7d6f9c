"""On a machine without CUDA the Triton backend runs in Triton's interpreter.

Triton reads the variable when it is first imported, so it is set before any test file is.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Three layers of two kinds: windows smaller than the prompts, two KV groups, grouped heads.
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of which only the config is there: enough for dummy weights."""
    folder: Path = tmp_path_factory.mktemp("verify") / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA))
    return str(folder)
