"""The rope of a GGUF file in config.json keys.

llama.cpp divides the frequencies of Llama 3.1 and later by factors that its converter computed and
stored as the tensor `rope_freqs.weight`. The parameters behind them are gone, so they are given as
a `longrope` whose short and long factors are the same and whose attention factor is 1: the same
frequencies exactly, at every length.
"""

from typing import Any

import numpy as np

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.gguf_file import GgufFile, GgufTensor
from headrace.checkpoint.gguf_keys import ArchitectureKeys

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_DEFAULT_THETA = 10_000.0
_SCALING = "rope.scaling."
_KNOWN_SCALING = {
    "type",
    "factor",
    "original_context_length",
    "attn_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "finetuned",  # says how the model was trained, changes nothing
}


def rope_keys(file: GgufFile, keys: ArchitectureKeys, *, head_dim: int) -> dict[str, Any]:
    """rope_theta, and rope_scaling and partial_rotary_factor where the file has them.

    Raises:
        UnsupportedError: a scaling type or key that has no counterpart.
        CheckpointError: a scaling without its numbers.
    """
    config: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base") or _DEFAULT_THETA}
    rotary = keys.get("rope.dimension_count")
    if rotary and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    scaling = _scaling(file, keys)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _scaling(file: GgufFile, keys: ArchitectureKeys) -> dict[str, Any] | None:
    for name in keys.names():
        if name.startswith(_SCALING) and name.removeprefix(_SCALING) not in _KNOWN_SCALING:
            raise UnsupportedError(
                f"{file.path}: the rope scaling key {name} is unknown",
                remedy=f"Known: {', '.join(sorted(_KNOWN_SCALING))}",
            )
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    # llama.cpp takes a factor without a type as linear.
    kind = keys.get("rope.scaling.type") or "linear"
    factors = _stored_factors(file)
    if kind == "linear" and factors is None:
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind in ("none", "linear", "longrope") and factors is not None:
        stretch = factor if kind == "linear" else 1.0
        return {
            "rope_type": "longrope",
            "short_factor": (factors[0] * stretch).tolist(),
            "long_factor": (factors[1] * stretch).tolist(),
            "attention_factor": keys.get("rope.scaling.attn_factor") or 1.0,
            "original_max_position_embeddings": keys.get("rope.scaling.original_context_length")
            or keys.require("context_length"),
        }
    if kind == "none":
        return None
    if kind == "yarn" and factors is None:
        return _yarn(keys)
    if kind == "longrope":
        raise CheckpointError(
            f"{file.path} has longrope but lacks {' and '.join(ROPE_TENSORS[1:])}"
        )
    raise UnsupportedError(
        f"{file.path}: rope scaling {kind}" + (" with rope_freqs.weight" if factors else ""),
        remedy="Supported: none, linear, yarn, longrope, and factors with none or linear",
    )


def _yarn(keys: ArchitectureKeys) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": keys.require("rope.scaling.factor"),
        "original_max_position_embeddings": keys.require("rope.scaling.original_context_length"),
        "attention_factor": keys.get("rope.scaling.yarn_attn_factor")
        or keys.get("rope.scaling.attn_factor"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _stored_factors(file: GgufFile) -> tuple[np.ndarray, np.ndarray] | None:
    """Divisors of the frequencies, float32 [head_dim / 2]: for short and for long contexts."""
    freqs, long, short = (file.tensors.get(name) for name in ROPE_TENSORS)
    short, long = (freqs, freqs) if freqs is not None else (short, long)
    if short is None or long is None:
        return None
    return _float32(file, short), _float32(file, long)


def _float32(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    if tensor.kind.name != "F32":
        raise UnsupportedError(f"{file.path}: tensor {tensor.name} is {tensor.kind.name}, not F32")
    factors: np.ndarray = file.raw(tensor).view(np.float32).reshape(-1)
    return factors
