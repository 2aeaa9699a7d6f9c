"""The hidden states that a sequence keeps for its request."""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.config.persona import ModelTraits
from headrace.request.packed_states import PackedStates
from headrace.request.request import Request
from headrace.scheduler.token_rows import TokenRows


class StateRows(TokenRows):
    """A row holds the states of some layers, [layers, H].

    Args:
        first: position of the first row. layers: what a row holds, 0 to `num_layers`.
        dtype: of the model's states.
        newest: keep the last row alone.
    """

    def __init__(
        self,
        first: int,
        layers: tuple[int, ...],
        *,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        newest: bool = False,
    ) -> None:
        super().__init__(first, len(layers) * hidden_size * dtype.itemsize)
        self.layers = layers
        self.inner = tuple(sorted(set(layers) - {num_layers}))
        self._hidden_size, self._dtype, self._newest = hidden_size, dtype, newest

    def add(self, first: int, states: NDArray[np.uint8], inner: tuple[int, ...]) -> None:
        """Take the rows of positions from `first` on.

        Args:
            states: [rows, L, bytes of a state]: those of the layers `inner`, then of the last norm.
        """
        if inner or len(self.layers) > 1:
            places = {layer: place for place, layer in enumerate(inner)}
            states = states[:, [places.get(layer, len(inner)) for layer in self.layers]]
        if self._newest:
            assert first == self.next_position, "rows come in order, each once"
            self._data.clear()
            first, states = first + len(states) - 1, states[-1:]
            self.first = self.next_position = first
        self.append(first, states)

    def packed(self) -> PackedStates:
        """All rows. No more may be added."""
        return PackedStates(
            data=self._data,
            rows=self.next_position - self.first,
            hidden_size=self._hidden_size,
            dtype=str(self._dtype).removeprefix("torch."),
            first_position=self.first,
            layers=self.layers,
        )


def state_rows_of(request: Request, traits: ModelTraits, dtype: torch.dtype) -> StateRows | None:
    """Where a sequence keeps what its request asks for, if it does."""
    params = request.params
    if not params.wants_hidden_states:
        return None
    every = params.return_hidden_states == "all"
    return StateRows(
        0 if every else len(request.prompt_token_ids) - 1,
        params.state_layers(traits.num_layers),
        num_layers=traits.num_layers,
        hidden_size=traits.hidden_size,
        dtype=dtype,
        newest=params.return_hidden_states == "final",
    )
