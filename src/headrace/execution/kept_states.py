"""Buffers in which decode graphs leave the hidden states of inner layers."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KeptStates:
    """One buffer for each layer, for the largest bucket; smaller ones use its front.

    Args:
        layers: ascending; 0 is the embedding, i the stream behind i layers.
        rows: of the largest bucket. dtype: of the model.
    """

    def __init__(
        self,
        layers: Sequence[int],
        rows: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        shape = (len(self.layers), rows, hidden_size)
        self._buffers = dict(
            zip(self.layers, torch.zeros(shape, dtype=dtype, device=device), strict=True)
        )

    def keep(self, layer: int, stream: Tensor) -> None:
        """Copy the stream [n, H] behind a layer; recorded into a graph.

        By a kernel: a copy engine's node would stand between kernels that overlap their launches.
        """
        torch.mul(stream, 1, out=self._buffers[layer][: len(stream)])

    def of(self, layers: Sequence[int], index: Tensor) -> Tensor:
        """[M, L + 1, H]: states of the rows `index` [M] int64 as the last replay left them, and
        room for one layer more."""
        some = self._buffers[self.layers[0]]
        found: Tensor = some.new_empty(len(index), len(layers) + 1, some.shape[1])
        for place, layer in enumerate(layers):
            found[:, place] = self._buffers[layer].index_select(0, index)
        return found
