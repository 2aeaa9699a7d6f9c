"""What a step wrote and said, by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch

KeyValue = tuple[Tensor, Tensor]
"""Keys [T, K, D] and values [T, K, Dv] of the tokens of a step in one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContents:
    """One run of a step over T tokens, of which S sample.

    Attributes:
        batch: filled: ids, positions, slots, page tables.
        slots: of each layer, [T] int64; 0 where nothing is said: padding, rows that have ended.
        keys_values: of each layer.
        token_index: [S] int64, places of the tokens whose logits these are; `None` without any.
        logits: [S, V] float32.
        shaken, shaken_logits: keys, values and logits of the same with roundings added.
    """

    batch: ForwardBatch
    slots: Sequence[Tensor]
    keys_values: Sequence[KeyValue]
    token_index: Tensor | None
    logits: Tensor | None
    shaken: Sequence[KeyValue]
    shaken_logits: Tensor | None
