"""States of inner layers: the model's forward with a tap that keeps them.

Layers are numbered as requests number them: 0 is the embedding, i the stream behind i layers.
"""

from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.execution.eager import Model
from headrace.execution.kept_states import KeptStates
from headrace.models.decoder import CausalDecoder


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

        with model.tapped(keep, request.layers):
            hidden = model.forward(input_ids, positions, batch)
        batch.asked_states = asked
        return hidden

    return forward


def with_kept_states(model: CausalDecoder, kept: KeptStates) -> Model:
    """The forward that leaves the states of some layers in buffers, as graphs must."""

    def forward(input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        with model.tapped(kept.keep, kept.layers):
            return model.forward(input_ids, positions, batch)

    return forward
