"""The eager path: operator by operator, any batch. The reference that other paths must equal."""

from collections.abc import Callable

from torch import Tensor

from headrace.base.decision import Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.path import AlwaysReady

Model = Callable[[Tensor, Tensor, ForwardBatch], Tensor]
"""(input_ids [T], positions [T], batch) -> hidden states [T, H] after the last norm."""


class EagerPath(AlwaysReady):
    """Prepares, plans attention and calls the model."""

    name = "eager"

    def __init__(self, model: Model, ends: EagerEnds) -> None:
        self.ends = ends
        self._model = model

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        return Bucket(tokens=facts.tokens, sequences=facts.sequences)

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        self.ends.begin(batch)
        hidden = self._model(batch.input_ids, batch.positions, batch)
        return self.ends.finish(hidden, batch)
