"""What stands before and behind the model's body in every path that is no graph as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.execution.preparation import BatchPreparation
from headrace.observers.tap import NO_TAPS, Taps

Logits = Callable[[Tensor, ForwardBatch], LogitsProcessorOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerEnds:
    """Both ends of a forward, operator by operator.

    Attributes:
        preparation: fills the batch from the rows.
        backends: one per KV group.
        logits: (hidden states [T, H], batch) -> logits of the rows that sample.
        taps: device work around the model.
    """

    preparation: BatchPreparation
    backends: Sequence[AttentionBackend]
    logits: Logits
    taps: Taps = NO_TAPS

    def begin(self, batch: ForwardBatch) -> None:
        """All that the body needs; nothing is written to the KV pool yet."""
        self.preparation.fill(batch)
        self.plan_attention(batch)
        self.taps.before(batch)

    def plan_attention(self, batch: ForwardBatch) -> None:
        """What the layers of a step share; anew if another batch ran since."""
        for backend in self.backends:
            backend.prepare_metadata(batch)

    def finish(self, hidden: Tensor, batch: ForwardBatch) -> LogitsProcessorOutput:
        """From hidden states [T, H], after the last norm, to what the step was asked for."""
        self.taps.after(batch)
        return self.logits(hidden, batch)
