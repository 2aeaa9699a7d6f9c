"""A tiny Llama with seeded random weights, as transformers saves it: both sides can load it."""

from pathlib import Path

import torch
from tiny_engine import LLAMA, write_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

# Wide enough for logits that differ clearly from token to token.
INITIALIZER_RANGE = 0.15
CONTEXT = 1024


def write_tiny_llama(folder: Path) -> Path:
    """Weights, byte-level tokenizer and chat template in `folder`, the same each time."""
    write_checkpoint(folder, "llama")
    settings = LLAMA | {
        "initializer_range": INITIALIZER_RANGE,
        "max_position_embeddings": CONTEXT,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    return folder
