"""Experts of GGUF files: stacked into one tensor there, one tensor each in Hugging Face files.

Facts: the converter of ggml-org/llama.cpp.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from headrace.base.errors import CheckpointError
from headrace.checkpoint.gguf_file import GgufTensor

_PARTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_PATTERN = re.compile(rf"blk\.(\d+)\.({'|'.join(_PARTS)})\.weight")


def expert_tensors(tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Name and place of each expert of a stacked tensor; nothing for any other tensor.

    Raises:
        CheckpointError: a stack that is none.
    """
    match = _PATTERN.fullmatch(tensor.name)
    if match is None:
        return
    if len(tensor.shape) != 3 or not tensor.shape[0]:
        raise CheckpointError(
            f"Tensor {tensor.name} has shape {list(tensor.shape)}",
            why="experts are stacked: [experts, outputs, inputs]",
        )
    count, *shape = tensor.shape
    size = tensor.nbytes // count  # rows are whole blocks, so experts are
    for expert in range(count):
        name = f"model.layers.{match[1]}.mlp.experts.{expert}.{_PARTS[match[2]]}.weight"
        start = tensor.start + expert * size
        yield name, replace(tensor, shape=tuple(shape), start=start, nbytes=size)
