"""A GGUF file read as a Hugging Face checkpoint."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headrace.base.errors import CheckpointError
from headrace.checkpoint.dequantize import Bytes, dequantize
from headrace.checkpoint.gguf_config import gguf_architecture, gguf_config
from headrace.checkpoint.gguf_experts import expert_tensors
from headrace.checkpoint.gguf_file import GgufFile, GgufTensor
from headrace.checkpoint.gguf_names import hugging_face_name
from headrace.checkpoint.gguf_rope import ROPE_TENSORS
from headrace.checkpoint.gguf_tokenizer import gguf_tokenizer_source
from headrace.checkpoint.interface import TensorEntry
from headrace.checkpoint.stated_pooling import GGUF_POOLINGS
from headrace.config.tokenizer_source import TokenizerSource

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """See `Checkpoint`. What the converter to GGUF changed is changed back on reading.

    `read` may be called from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._architecture = gguf_architecture(self._file)
        self.config: Mapping[str, Any] = gguf_config(self._file, self._architecture)
        self.generation_config: Mapping[str, Any] = {}
        self._sources: dict[str, GgufTensor] = {}
        for tensor in self._file.tensors.values():
            if tensor.name in ROPE_TENSORS:
                continue  # part of the configuration
            whole = (hugging_face_name(tensor.name, self._architecture), tensor)
            for name, source in list(expert_tensors(tensor)) or [whole]:
                if name in self._sources:
                    raise CheckpointError(
                        f"{path} holds {name} twice: {self._sources[name].name} and {tensor.name}"
                    )
                self._sources[name] = source
        self.tensors: Mapping[str, TensorEntry] = {
            name: TensorEntry(
                name=name,
                shape=tensor.shape,
                dtype=tensor.kind.name,
                file=path,
                nbytes=tensor.nbytes,
            )
            for name, tensor in self._sources.items()
        }

    @cached_property
    def tokenizer_source(self) -> TokenizerSource | None:
        return gguf_tokenizer_source(self._file)

    @property
    def pooling(self) -> str | None:
        stated = self._file.metadata.get(f"{self._architecture}.pooling_type")
        return GGUF_POOLINGS.get(stated) if isinstance(stated, int) else None

    def read(self, name: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
        source = self._sources[name]
        raw = self._file.raw(source)
        heads = self._interleaved_heads(name)
        if heads:
            raw = self._halves_apart(name, source, raw, heads)
        if source.kind.name in _PLAIN:
            tensor = torch.from_numpy(raw.copy()).view(_PLAIN[source.kind.name])
        else:
            tensor = dequantize(raw, source.kind, out)
        if tensor is not out:
            tensor = tensor.reshape(source.shape)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            return tensor.float() - 1.0  # stored as the factor 1 + w
        return tensor

    def _interleaved_heads(self, name: str) -> int:
        """Heads of a tensor whose rows the converter reordered (q and k of llama files), or 0."""
        if self._architecture == "llama" and ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        if self._architecture == "llama" and ".self_attn.k_proj." in name:
            return int(self.config["num_key_value_heads"])
        return 0

    def _halves_apart(self, name: str, source: GgufTensor, raw: Bytes, heads: int) -> Bytes:
        """Llama files interleave the two rope halves of a head's rows; put them apart again.

        Done on the packed rows, which are whole blocks: there are fewer bytes to move.
        """
        rows = source.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.path}: tensor {name} has {rows} rows", why=f"The model has {heads} heads"
            )
        if len(source.shape) == 1 and source.kind.block_elements > 1:
            raise CheckpointError(
                f"{self.path}: tensor {name} is one row of {source.kind.name}",
                why="Its elements must be reordered, which packed blocks do not allow",
            )
        pairs = raw.reshape(heads, rows // (2 * heads), 2, -1)  # [N, D / 2, 2, bytes of a row]
        return pairs.swapaxes(1, 2).reshape(raw.shape)
