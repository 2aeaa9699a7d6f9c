"""Split prefill: the forward of a prompt step some layers at a time, with other steps in between.

The stream behind the last layer that ran waits on the device. What other steps overwrite meanwhile
is what backends keep of a batch, hence their metadata is prepared anew for the next part; all else
belongs to the batch. (SGLang has the idea as `SPLIT_PREFILL`.)
"""

from dataclasses import dataclass

from torch import Tensor

from headrace.base.decision import Refusal
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.execution.eager_ends import EagerEnds
from headrace.execution.path import AlwaysReady
from headrace.layers.rope import Rotation
from headrace.models.decoder import Decoder

LEAST_TOKENS = 256
"""Steps of fewer tokens are hardly longer than a decode step, and run whole."""


@dataclass(slots=True, kw_only=True)
class SplitForward:
    """A forward between two layers.

    Attributes:
        stream: [T, H], maybe in parts. layer: the next one to run.
    """

    batch: ForwardBatch
    stream: Tensor
    rotations: dict[str, Rotation]
    layer: int = 0


class SplitPrefill(AlwaysReady):
    """Runs prompt steps in parts, eagerly.

    Args:
        layers: of one part.
        model: the body. ends: what stands around it.
    """

    name = "split_prefill"

    def __init__(self, *, layers: int, model: Decoder, ends: EagerEnds) -> None:
        self.layers, self.ends = layers, ends
        self._model = model

    # ---- choosing

    def admits(self, facts: BatchFacts) -> Bucket | Refusal:
        reason = self._refusal(facts)
        if reason:
            return Refusal(subject=self.name, reason=reason)
        return Bucket(tokens=facts.tokens, sequences=facts.sequences)

    def _refusal(self, facts: BatchFacts) -> str:
        if not facts.split:
            return "nobody decodes beside a prompt"
        if facts.tokens < LEAST_TOKENS:
            return f"fewer than {LEAST_TOKENS} prompt tokens"
        if facts.hidden:
            return "hidden states are asked, which a whole forward leaves"
        return ""

    # ---- delivery

    def run(self, batch: ForwardBatch, bucket: Bucket) -> LogitsProcessorOutput:
        """All parts at once."""
        output = self.advance(self.begin(batch), len(self._model.layers))
        assert output is not None, "all layers have run"
        return output

    def begin(self, batch: ForwardBatch) -> SplitForward:
        """Prepare the batch and embed its tokens; no layer runs yet."""
        self.ends.begin(batch)
        return SplitForward(
            batch=batch,
            stream=self._model.embed_tokens(batch.input_ids),
            rotations=self._model.rotations(batch.positions),
        )

    def advance(
        self, forward: SplitForward, layers: int, *, reinit_attention_backend: bool = False
    ) -> LogitsProcessorOutput | None:
        """Run the next `layers` layers; the logits once all have run, `None` before.

        Args:
            reinit_attention_backend: prepare attention's metadata anew, as is needed when another
                batch ran since.
        """
        model, batch = self._model, forward.batch
        if reinit_attention_backend:
            self.ends.plan_attention(batch)
        first, end = forward.layer, min(forward.layer + layers, len(model.layers))
        forward.stream = model.run_layers(forward.stream, forward.rotations, batch, first, end)
        forward.layer = end
        if end < len(model.layers):
            return None
        return self.ends.finish(model.norm(forward.stream), batch)
