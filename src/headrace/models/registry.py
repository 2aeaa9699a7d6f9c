"""Architecture names of checkpoints -> model families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.base.errors import UnsupportedError
from headrace.config.persona import ModelTraits
from headrace.config.plan import RopePlan
from headrace.layers.operators import TORCH_OPERATORS, Operators
from headrace.layers.weight_formats import DENSE, WeightFormat
from headrace.layers.weights import WeightSpace
from headrace.memory.arena import Arena
from headrace.models import config_reader as read
from headrace.models.decoder import CausalDecoder
from headrace.models.gemma3 import Gemma3ForCausalLM, gemma3_traits
from headrace.models.llama import llama_traits, mistral_traits
from headrace.models.qwen2 import qwen2_traits
from headrace.models.qwen3 import qwen3_traits
from headrace.models.qwen3_moe import qwen3_moe_traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model.

    Attributes:
        name: `ModelTraits.family`.
        architecture: the name in `architectures` of config.json.
        model_type: the name in `model_type` of config.json.
        traits: reads the config.
        module: builds the tree; that of pre-norm blocks where no other is named.
    """

    name: str
    architecture: str
    model_type: str
    traits: Callable[[Mapping[str, Any]], ModelTraits]
    module: type[CausalDecoder] = CausalDecoder


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        model_type="llama",
        traits=llama_traits,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        model_type="mistral",
        traits=mistral_traits,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        traits=qwen2_traits,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        traits=qwen3_traits,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        traits=qwen3_moe_traits,
    ),
    Family(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        traits=gemma3_traits,
        module=Gemma3ForCausalLM,
    ),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by architecture or, where none is stated, by model type.

    Raises:
        UnsupportedError: not a supported one; names it and lists those that are. Code that comes
            with a checkpoint (`auto_map`) is never run.
    """
    architectures = read.texts(config, "architectures") or ()
    model_type = read.text(config, "model_type", "")
    known_type = any(family.model_type == model_type for family in FAMILIES)
    custom = bool(config.get("auto_map")) and not known_type
    for family in FAMILIES:
        named_so = family.architecture in architectures
        typed_so = not architectures and family.model_type == model_type
        if not custom and (named_so or typed_so):
            return family
    named = ", ".join(architectures) or f"of type {model_type!r}"
    raise UnsupportedError(
        f"Model architecture {named} is not supported",
        why=f"the checkpoint (type {model_type!r}) brings its own code, which is never run"
        if custom
        else "",
        remedy=f"Supported: {', '.join(family.architecture for family in FAMILIES)}",
    )


def read_model_traits(config: Mapping[str, Any]) -> ModelTraits:
    """What a checkpoint's config says about its model.

    Raises:
        UnsupportedError: architecture, weight format, rope or activation is not supported.
        CheckpointError: a key is missing or has a value of the wrong type.
    """
    quantisation = read.section(config, "quantization_config")
    if quantisation is not None:
        method = read.text(quantisation, "quant_method", "unknown")
        raise UnsupportedError(
            f"Weights quantised with {method!r} are not supported",
            remedy="Supported: safetensors in float32, bfloat16 or float16, and GGUF",
        )
    return family_of(config).traits(config)


def build_model(
    traits: ModelTraits,
    ropes: Mapping[str, RopePlan],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    arena: Arena | None = None,
    weight_format: WeightFormat = DENSE,
    operators: Operators = TORCH_OPERATORS,
) -> CausalDecoder:
    """The module tree with parameters of undefined content on the device.

    Args:
        ropes: one settled rope for each name in `traits.ropes`.
        arena: where the memory comes from; one of its own if None.
        weight_format: of the linear layers. `finish_weights` must follow the loading.
        operators: how compositions of layers are computed.
    """
    assert ropes.keys() == traits.ropes.keys(), "the plan settles every rope of the traits"
    module = next(family.module for family in FAMILIES if family.name == traits.family)
    space = WeightSpace(
        dtype=dtype, arena=arena or Arena(device), format=weight_format, operators=operators
    )
    with torch.inference_mode(False):
        return module(traits, dict(ropes), space=space).eval()
