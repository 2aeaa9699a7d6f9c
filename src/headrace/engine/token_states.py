"""Hidden states as the caller gets them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.request.packed_states import PackedStates


@dataclass(frozen=True, slots=True)
class TokenStates:
    """Hidden states of one continuation.

    Row i belongs to position `first_position + i`, where the prompt begins at 0. With "last" that
    are the states the output tokens were drawn from: row i made token i. With "all" the rows begin
    at the prompt's first token; the last output token has none, since it was never read.

    Attributes:
        packed: the numbers as bytes.
    """

    packed: PackedStates

    @property
    def states(self) -> Tensor:
        """[rows, layers, H] on the host, in the model's dtype; the same memory at every call."""
        packed = self.packed
        shape = (packed.rows, len(packed.layers), packed.hidden_size)
        dtype: torch.dtype = getattr(torch, packed.dtype)
        if not packed.rows:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(packed.data, dtype=dtype).view(shape)

    @property
    def layers(self) -> tuple[int, ...]:
        """Which states a row holds: 0 the embedding, i the stream behind i layers, the number of
        layers that after the last norm."""
        return tuple(self.packed.layers)

    @property
    def first_position(self) -> int:
        return self.packed.first_position

    def __len__(self) -> int:
        """Rows."""
        return self.packed.rows

    def __repr__(self) -> str:
        packed = self.packed
        return (
            f"TokenStates(rows={packed.rows}, layers={self.layers}, "
            f"hidden_size={packed.hidden_size}, dtype={packed.dtype}, "
            f"first_position={packed.first_position})"
        )
