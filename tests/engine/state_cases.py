"""Checkpoints that transformers wrote, and its own hidden states to hold ours against."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.request.sampling_params import SamplingParams

VOCAB = 128
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": VOCAB - 1,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
        },
    ),
}
NUM_LAYERS = 3
TOLERANCE = 1e-4


def write_model(family: str, folder: Path) -> Path:
    """Random weights that keep the states of every layer apart and of the order of 1."""
    kind, config, more = MODELS[family]
    torch.manual_seed(5)
    model = kind(config(**SHAPE, **more)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(parameter.data.mean().item(), 0.2)
        else:
            size = 0.3 if name.endswith("embed_tokens.weight") else parameter.shape[1] ** -0.5
            parameter.data.normal_(0, size)
    model.save_pretrained(folder)
    return folder


class Reference:
    """transformers over one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def states(self, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
        """[tokens, layers, H]"""
        found = self._model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return torch.stack([found.hidden_states[layer][0] for layer in layers], 1)

    def check(self, output: RequestOutput, params: SamplingParams) -> None:
        """Every continuation has exactly the states that its request asks for."""
        for part in output.outputs:
            self._check(list(output.prompt_token_ids), part, params)

    def _check(self, prompt: list[int], part: CompletionOutput, params: SamplingParams) -> None:
        found = part.hidden_states
        if not params.wants_hidden_states:
            assert found is None
            return
        assert found is not None
        layers = params.state_layers(NUM_LAYERS)
        tokens = [*prompt, *part.token_ids][:-1]  # the last one was never read
        starts = {"all": 0, "last": len(prompt) - 1, "final": len(tokens) - 1}
        first = starts[str(params.return_hidden_states)]
        expected = self.states(tokens, layers)[first:]
        assert (found.first_position, found.layers) == (first, layers)
        assert found.states.shape == expected.shape
        assert found.states.dtype == torch.float32
        difference = (found.states - expected).abs().max().item()
        assert difference <= TOLERANCE, f"differs by {difference}"
