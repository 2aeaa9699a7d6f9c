"""What the plan needs to know of a checkpoint's files."""

from collections import Counter
from dataclasses import dataclass

from headrace.checkpoint.interface import Checkpoint

STORED_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Format and dtype of the files.

    Attributes:
        load_format: safetensors or gguf.
        dtype: of most of the stored bytes; "packed" for quantised blocks, which carry no compute
            dtype; `None` where there are no weights and the config's word counts.
    """

    load_format: str = "safetensors"
    dtype: str | None = None


def checkpoint_facts(checkpoint: Checkpoint) -> CheckpointFacts:
    """The format, and the dtype that most bytes are stored in."""
    bytes_of: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        bytes_of[STORED_DTYPES.get(entry.dtype, "packed")] += entry.nbytes
    return CheckpointFacts(
        load_format="gguf" if checkpoint.path.suffix == ".gguf" else "safetensors",
        dtype=bytes_of.most_common(1)[0][0] if bytes_of else None,
    )
