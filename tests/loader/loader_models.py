"""Tiny models and checkpoints for the tests of this folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loader_shapes import CONFIG, VOCAB
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace import LLM
from headrace.request.sampling_params import SamplingParams

PROMPT = [5, 250, 3, 77, 140, 9, 9, 61, 200, 18, 33, 4, 120, 99, 7, 71, 16]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def write_checkpoint(folder: Path, **config: Any) -> Path:
    """A folder as transformers writes it, of weights that make every tensor matter."""
    settings = CONFIG | config
    described = AutoConfig.for_model(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(described)
        for parameter in model.parameters():
            is_vector = parameter.dim() == 1
            deviation = 0.3 if is_vector else parameter.shape[-1] ** -0.5
            parameter.data.normal_(1.0 if is_vector else 0.0, deviation)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))  # as an author writes it
    return folder


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Set tensors of the folder's one file; None takes one out."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | dict(changes)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def open_llm(folder: Path, **options: Any) -> LLM:
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    return LLM(str(folder), **(settings | options))


def our_logprobs(llm: LLM, prompt: list[int] = PROMPT) -> Tensor:
    """Logprobs [L, V] after each prompt token; the last row is that of the token sampled."""
    everything = tuple(range(VOCAB))
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprob_token_ids=everything
    )
    prefixes = [prompt[:length] for length in range(1, len(prompt) + 1)]
    outputs = llm.generate(prefixes, params, use_tqdm=False)
    entries = [output.outputs[0].logprobs[0] for output in outputs]
    rows = [[entry[token].logprob for token in everything] for entry in entries]
    return torch.tensor(rows)


def their_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def their_logprobs(model: PreTrainedModel, prompt: list[int] = PROMPT) -> Tensor:
    """Logprobs [L, V] after each prompt token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def difference(llm: LLM, model: PreTrainedModel) -> float:
    return (our_logprobs(llm) - their_logprobs(model)).abs().max().item()
