"""The eager path: operator by operator, any batch. The reference that other paths must equal."""

from collections.abc import Callable, Sequence

from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.base.decision import Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput, PPProxyTensors
from headrace.execution.path import AlwaysReady
from headrace.execution.preparation import BatchPreparation
from headrace.observers.tap import NO_TAPS, Taps

Model = Callable[[Tensor, Tensor, ForwardBatch], Tensor]
Logits = Callable[[Tensor, ForwardBatch], LogitsProcessorOutput]


class EagerPath(AlwaysReady):
    """Prepares, plans attention and calls the model.

    Args:
        preparation: fills the batch from the rows.
        backends: one per KV group.
        model: (input_ids [T], positions [T], batch) -> hidden states [T, H].
        logits: (hidden states, batch) -> logits of the rows that sample.
        taps: device work around the model.
    """

    name = "eager"

    def __init__(
        self,
        preparation: BatchPreparation,
        backends: Sequence[AttentionBackend],
        model: Model,
        logits: Logits,
        taps: Taps = NO_TAPS,
    ) -> None:
        self._preparation, self._backends = preparation, tuple(backends)
        self._model, self._logits, self._taps = model, logits, taps

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        return Bucket(tokens=facts.tokens, sequences=facts.sequences)

    def run(
        self,
        batch: ForwardBatch,
        bucket: Bucket,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        assert pp_proxy_tensors is None, "pipeline stages are refused by the plan"
        self._preparation.fill(batch)
        for backend in self._backends:
            backend.prepare_metadata(batch)
        self._taps.before(batch)
        hidden = self._model(batch.input_ids, batch.positions, batch)
        self._taps.after(batch)
        return self._logits(hidden, batch)
