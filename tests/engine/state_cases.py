"""Checkpoints that transformers wrote, its own hidden states to hold ours against, and requests."""

import random
from pathlib import Path
from typing import Any

import torch
from tiny_engine import make_engine
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

from headrace.engine.engine import Engine
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
EVERY = tuple(range(NUM_LAYERS + 1))
TOLERANCE = 1e-4


def asking(states: str, layers: tuple[int, ...] = (-1,), **options: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 3}
    return SamplingParams(
        return_hidden_states=states, hidden_state_layers=layers, **(settings | options)
    )


PLAIN = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
MIXED = [
    asking("last"),
    asking("all", temperature=0),
    PLAIN,
    asking("last", (0, 2), n=3),
    asking("final", (2, -1)),
    asking("all", EVERY),
    asking("all", (-1, 1), n=2),
    asking("last", max_tokens=1),
    asking("all", (1,), max_tokens=1),
]
LENGTHS = (1, 16, 33, 5, 13, 50, 17, 40, 21)


def prompts() -> list[list[int]]:
    """One for each of `MIXED`; three begin alike."""
    draw = random.Random(7)
    lists = [[draw.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    lists[5][:30] = lists[7][:30] = lists[2][:30]
    return lists


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


def engine_of(reference: Reference, **options: Any) -> Engine:
    settings: dict[str, Any] = {"load_format": "auto", "cpu_graph": "off"}
    return make_engine(reference.folder, **(settings | options))
