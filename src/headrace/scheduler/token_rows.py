"""What a sequence keeps for its request of every token: hidden states, the choice of experts.

One row for each position, from the first that is asked on, without a gap and none twice: a step
brings the rows that come next, whatever it computes besides. So a retracted sequence, which
computes positions once more, asks for the missing ones only, and may take all others from the
prefix cache.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.config.persona import ModelTraits
from headrace.request.packed_states import PackedStates
from headrace.request.request import Request


class TokenRows:
    """The rows of one sequence so far, copied out of the results of steps, which many sequences
    share and which a GPU sends into pinned memory.

    Args:
        first: position of the first row. row_bytes: of each row.

    Attributes:
        next_position: the first position without a row.
    """

    def __init__(self, first: int, row_bytes: int) -> None:
        self.first = self.next_position = first
        self._row_bytes = row_bytes
        self._data = bytearray()

    def append(self, first: int, rows: NDArray[Any]) -> None:
        """Take the rows of positions from `first` on, [n, ...]."""
        assert first == self.next_position, "rows come in order, each once"
        self._data += np.ascontiguousarray(rows).data
        self.next_position += len(rows)

    def take_prompt(self, other: Self, end: int) -> None:
        """Have the rows of positions before `end` from another sequence of the same prompt."""
        if self.next_position == self.first < end <= other.next_position:
            self._data += memoryview(other._data)[: (end - self.first) * self._row_bytes]
            self.next_position = end


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


class RoutingRows(TokenRows):
    """A row holds int32 numbers of experts, [layers, chosen]; the first one is that of position 0.

    Args:
        layers: how many have experts. chosen: experts of a token.
    """

    def __init__(self, layers: int, chosen: int) -> None:
        super().__init__(0, 4 * layers * chosen)
        self._layers, self._chosen = layers, chosen

    def experts(self) -> NDArray[np.int32]:
        """All rows, [rows, layers, chosen]. No more may be added."""
        ids = np.frombuffer(self._data, dtype="<i4")
        return ids.reshape(self.next_position, self._layers, self._chosen)


def routing_rows_of(request: Request, traits: ModelTraits) -> RoutingRows | None:
    """Where a sequence keeps what its request asks for, if it does."""
    if not request.params.return_routed_experts or traits.moe is None:
        return None
    return RoutingRows(len(traits.moe_layers), traits.moe.num_experts_per_tok)
