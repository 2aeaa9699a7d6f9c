"""States of inner layers: the model's forward with a tap that keeps them.

Layers are numbered as requests number them: 0 is the embedding, i the stream behind i layers.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.execution.eager import Model
from headrace.execution.kept_states import KeptStates
from headrace.models.decoder import CausalDecoder

Keep = Callable[[int, Tensor], None]
"""(layer, residual stream [T, H], which the next layer may write)"""


def with_asked_states(model: CausalDecoder) -> Model:
    """The forward that leaves in `batch.asked_states` what `batch.side` asks for; where it asks for
    no inner layer, the plain one."""

    def forward(input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        request = batch.side.hidden
        if request is None or not request.layers:
            return model.forward(input_ids, positions, batch)
        index = request.token_index
        assert index is not None, "layers are asked of tokens"

        asked: Tensor | None = None

        def keep(layer: int, stream: Tensor) -> None:
            nonlocal asked
            if asked is None:
                shape = (len(index), len(request.layers) + 1, stream.shape[1])
                asked = stream.new_empty(shape)
            asked[:, request.layers.index(layer)] = stream.index_select(0, index)

        with _keeping(model, request.layers, keep):
            hidden = model.forward(input_ids, positions, batch)
        batch.asked_states = asked
        return hidden

    return forward


def with_kept_states(model: CausalDecoder, kept: KeptStates) -> Model:
    """The forward that leaves the states of some layers in buffers, as graphs must."""

    def forward(input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        with _keeping(model, kept.layers, kept.keep):
            return model.forward(input_ids, positions, batch)

    return forward


@contextmanager
def _keeping(model: CausalDecoder, layers: Collection[int], keep: Keep) -> Iterator[None]:
    def behind(index: int, stream: Tensor) -> None:
        keep(index + 1, stream)

    def before(stream: Tensor) -> None:
        keep(0, stream)

    inner = frozenset(layer - 1 for layer in layers)
    with model.tapped(behind, before if 0 in layers else None, inner):
        yield
