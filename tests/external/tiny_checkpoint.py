"""A tiny Llama with seeded random weights, as transformers saves it: both sides can load it."""

import json
from pathlib import Path

import torch
from tiny_engine import LLAMA, write_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

# Wide enough for logits that differ clearly from token to token.
INITIALIZER_RANGE = 0.15
CONTEXT = 1024
CLOSED_REASONING = (
    "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
)


def write_tiny_llama(folder: Path, *, reasons: bool = False) -> Path:
    """Weights, byte-level tokenizer and chat template in `folder`, the same each time.

    Args:
        reasons: its template has a switch for reasoning, as Qwen's has.
    """
    write_checkpoint(folder, "llama")
    if reasons:
        written = folder / "tokenizer_config.json"
        settings = json.loads(written.read_text())
        settings["chat_template"] += CLOSED_REASONING
        written.write_text(json.dumps(settings))
    sizes = LLAMA | {
        "initializer_range": INITIALIZER_RANGE,
        "max_position_embeddings": CONTEXT,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder
