"""The hidden states that a sequence keeps for its request.

One row of states for each position, from the first one that is asked on, without a gap and none
twice: a step brings the rows that come next, whatever it computes besides. So a retracted sequence,
which computes positions once more, asks for the missing ones only, and may take all others from the
prefix cache.
"""

import torch
from torch import Tensor

from headrace.request.packed_states import PackedStates


class StateRows:
    """The rows of one sequence so far, copied out of the results of steps, which many sequences
    share and which a GPU sends into pinned memory.

    Args:
        first: position of the first row. layers: what a row holds, 0 to `num_layers`.
        dtype: of the model's states.
    """

    def __init__(
        self,
        first: int,
        layers: tuple[int, ...],
        *,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.first, self.layers = first, layers
        self.inner = tuple(sorted(set(layers) - {num_layers}))
        self._hidden_size, self._dtype = hidden_size, dtype
        self._row_bytes = len(layers) * hidden_size * dtype.itemsize
        self._data = bytearray()

    @property
    def next_position(self) -> int:
        """The first position without a row."""
        return self.first + len(self._data) // self._row_bytes

    def add(self, first: int, states: Tensor, inner: tuple[int, ...]) -> None:
        """Take the rows of positions from `first` on.

        Args:
            states: [rows, L, H] on the host: those of the layers `inner`, then of the last norm.
        """
        assert first == self.next_position, "rows come in order, each once"
        places = {layer: place for place, layer in enumerate(inner)}
        columns = [places.get(layer, len(inner)) for layer in self.layers]
        if columns != list(range(states.shape[1])):
            states = states[:, columns]
        self._data += states.view(torch.uint8).numpy().reshape(-1).data

    def take_prompt(self, other: "StateRows", end: int) -> None:
        """Have the rows of positions before `end` from another sequence of the same prompt."""
        count = (end - self.first) * self._row_bytes
        if not self._data and 0 < count <= len(other._data):
            self._data += memoryview(other._data)[:count]

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
