"""What a checkpoint is to the rest of the engine, whatever the file format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.config.tokenizer_source import TokenizerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint, known without reading it.

    Attributes:
        name: the Hugging Face name (`model.layers.0.self_attn.q_proj.weight`).
        shape: as the model sees it, slowest dimension first.
        dtype: the stored type as the format spells it: `BF16`, `F32`, `Q4_K`.
        file: the file that holds it.
        nbytes: bytes it takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int


class Checkpoint(Protocol):
    """A model on disk: configuration, tokenizer and weights, in Hugging Face terms.

    Opening reads headers only. A tensor the format knows but the name map does not keeps its
    original name, so that a loader which demands that nothing is left over names it.
    """

    @property
    def path(self) -> Path:
        """The file or folder that was opened."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of config.json; a GGUF file's metadata is turned into the same keys."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json, or empty."""
        ...

    @property
    def tokenizer_source(self) -> TokenizerSource | None:
        """Where the tokenizer comes from; None when the checkpoint has none."""
        ...

    @property
    def pooling(self) -> str | None:
        """How its embeddings are pooled: "last", "mean", or what is not supported here. None when
        it does not say."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every tensor by name."""
        ...

    def read(self, name: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype; packed formats come as float32.

        Args:
            out: contiguous, on the CPU, of the tensor's shape and any float type. A packed tensor
                is unpacked straight into it, and `out` is returned; any other comes as if `out`
                were not there, which may have been written to.

        Safe to call from several threads; two read faster than one where two cores are free.

        Raises:
            KeyError: no such tensor.
            CheckpointError: the file no longer holds what its header promised.
            UnsupportedError: the stored type cannot be unpacked here.
        """
        ...
