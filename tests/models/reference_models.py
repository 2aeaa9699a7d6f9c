"""Tiny random models made by transformers, saved as checkpoints, and ours filled from the files."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan
from headrace.layers.weight_formats import DENSE, WeightFormat
from headrace.layers.weights import weight_slots
from headrace.models.decoder import CausalDecoder
from headrace.models.registry import build_model, read_model_traits

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
LENGTHS = (1, 15, 16, 17, 200)
CONTEXT = 64  # of every tiny model; the longest prompt goes past it
VOCAB = 128
TOLERANCE = 2e-4
LARGE_EPS = 1e-2  # so that a wrong eps shows


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model.

    Attributes:
        hold: transformers' rope is held at its values for `max_model_len` (dynamic, longrope).
        rotary_dim: transformers is patched to rotate only so many dimensions of a head.
        soft_cap: transformers is patched to cap attention logits, which it ignores for Gemma 3.
    """

    name: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 256
    hold: bool = False
    rotary_dim: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A case made real: the checkpoint, prompts, and transformers' logits [L, V] for each.

    `run` gives transformers' logits for other tokens.
    """

    case: Case
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    prompts: list[list[int]]
    logits: list[Tensor]
    run: Callable[[list[int]], Tensor]

    def traits(self) -> ModelTraits:
        return read_model_traits(self.config)

    def ours(
        self, dtype: torch.dtype = torch.float32, weight_format: WeightFormat = DENSE
    ) -> CausalDecoder:
        """Our model, every slot filled and no tensor left over."""
        length = self.case.max_model_len
        model = self._empty(self.traits(), length, dtype, weight_format)
        slots = weight_slots(model)
        assert slots.keys() == self.tensors.keys() - model.ignored_tensors()
        for name, slot in slots.items():
            slot.fill(self.tensors[name])
        return model

    def broken(self, traits: ModelTraits, length: int | None = None) -> CausalDecoder:
        """A model of wrong traits: what fits is filled, what it has too much is random."""
        model = self._empty(traits, length or self.case.max_model_len)
        for name, slot in weight_slots(model).items():
            stored = self.tensors.get(name)
            missing = torch.randn(slot.destination.shape, generator=seeded(1))
            slot.fill(missing if stored is None else stored)
        return model

    def difference(self, logits: list[Tensor]) -> float:
        pairs = zip(logits, self.logits, strict=True)
        return max((ours - theirs).abs().max().item() for ours, theirs in pairs)

    def _empty(
        self,
        traits: ModelTraits,
        length: int,
        dtype: torch.dtype = torch.float32,
        weight_format: WeightFormat = DENSE,
    ) -> CausalDecoder:
        plans = {name: RopePlan(traits=rope, length=length) for name, rope in traits.ropes.items()}
        return build_model(traits, plans, dtype, "cpu", weight_format=weight_format)


def make_reference(case: Case, folder: Path) -> Reference:
    """Build, save and run the case in transformers."""
    config_class, model_class = CLASSES[case.family]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 60,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": LARGE_EPS,
        "pad_token_id": None,
    }
    if case.family == "qwen2":
        del shape["head_dim"]  # always derived there
    config = config_class(**(shape | case.config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="eager").eval()
        randomise(model)
    model.save_pretrained(folder)
    if case.hold:
        hold_rope(model, case.max_model_len)
    generator = seeded(2)
    lengths = [length for length in LENGTHS if length <= case.max_model_len]
    if case.max_model_len < max(LENGTHS):
        lengths.append(case.max_model_len)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return Reference(
        case=case,
        config=json.loads((folder / "config.json").read_text()),
        tensors=load_file(folder / "model.safetensors"),
        prompts=prompts,
        logits=[reference_logits(model, case, prompt) for prompt in prompts],
        run=partial(reference_logits, model, case),
    )


def reference_logits(model: PreTrainedModel, case: Case, prompt: list[int]) -> Tensor:
    """[L, V]"""
    with patched(model, case), torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits
    return logits[0]


def randomise(model: PreTrainedModel) -> None:
    """Weights that make every trait matter, and logits with a standard deviation of about 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(parameter.data.mean().item(), 0.3)
        elif parameter.dim() == 1:
            parameter.data.normal_(0, 0.5)
        else:
            sharp = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data.normal_(0, sharp * parameter.shape[1] ** -0.5)
    with torch.no_grad():
        probe = torch.randint(VOCAB, (1, 50), generator=seeded(3))
        cap, model.config.final_logit_softcapping = (
            getattr(model.config, "final_logit_softcapping", None),
            None,
        )
        deviation = model(probe).logits.std()
        model.config.final_logit_softcapping = cap
        last = model.model.norm.weight
        offset = 1.0 if "Gemma" in type(model).__name__ else 0.0
        last.copy_((last + offset) / deviation - offset)


def hold_rope(model: PreTrainedModel, length: int) -> None:
    """Frequencies and attention scaling as for a sequence of `length`, whatever comes."""
    rope = model.model.rotary_emb
    rule = ROPE_INIT_FUNCTIONS[rope.rope_type]
    frequencies, scaling = rule(model.config, torch.device("cpu"), seq_len=length)
    rope.inv_freq, rope.attention_scaling = frequencies, scaling
    rope.rope_type = "held"  # neither of the kinds that are computed again


@contextmanager
def patched(model: PreTrainedModel, case: Case) -> Iterator[None]:
    """transformers, taught what it does not know about these families."""
    if case.rotary_dim is not None:
        rope, size, apply = (
            model.model.rotary_emb,
            case.rotary_dim,
            modeling_llama.apply_rotary_pos_emb,
        )
        theta = model.config.rope_parameters["rope_theta"]
        rope.inv_freq = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)

        def partly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            turned = apply(q[..., :size], k[..., :size], cos, sin)
            whole = zip(turned, (q, k), strict=True)
            turned_q, turned_k = (torch.cat((t, x[..., size:]), -1) for t, x in whole)
            return turned_q, turned_k

        with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", partly):
            yield
    elif case.soft_cap is not None:
        capped = partial(modeling_gemma3.eager_attention_forward, softcap=case.soft_cap)
        with mock.patch.object(modeling_gemma3, "eager_attention_forward", capped):
            yield
    else:
        yield


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
