"""Models on disk: names turned into paths, files read in Hugging Face terms."""

from headrace.checkpoint.interface import Checkpoint, TensorEntry
from headrace.checkpoint.names import SHORT_NAMES, resolve_model
from headrace.checkpoint.opening import open_checkpoint, open_tokenizer

__all__ = [
    "SHORT_NAMES",
    "Checkpoint",
    "TensorEntry",
    "open_checkpoint",
    "open_tokenizer",
    "resolve_model",
]
