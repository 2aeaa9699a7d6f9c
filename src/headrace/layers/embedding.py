"""Token embedding and the head that turns hidden states into logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.layers.weights import WeightSlot, WeightSpace


class Embedding(nn.Module):
    """Rows of a table [V, H].

    Args:
        scale: factor on the rows, rounded to the model's dtype first: Gemma was trained that way
            (sqrt(3072) = 55.4256 became 55.5 in bfloat16).
    """

    def __init__(
        self, vocab: int, hidden: int, *, space: WeightSpace, scale: float | None = None
    ) -> None:
        super().__init__()
        self.weight = space.parameter(vocab, hidden)
        self.scale = None if scale is None else torch.tensor(scale, dtype=space.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        rows = F.embedding(ids, self.weight)
        return rows if self.scale is None else rows * self.scale

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot(name=f"{path}.weight", destination=self.weight)


class LMHead(nn.Module):
    """Hidden states -> logits in float32.

    Args:
        tied: the embedding whose table is the head, or None for a head with weights of its own.
        soft_cap: logits become cap * tanh(logits / cap) (Gemma 2).
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        space: WeightSpace,
        tied: Embedding | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.soft_cap, self.format, self.operators = soft_cap, space.format, space.operators
        self.weight = None if tied is not None else space.format.create(space, vocab, hidden)
        self._tied = (tied,)  # in a tuple, so that the module tree holds the embedding once
        self.finished: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] float32"""
        logits = self.operators.logits(self, hidden)
        if self.soft_cap is None:
            return logits
        return torch.tanh(logits / self.soft_cap) * self.soft_cap

    @property
    def matrix(self) -> Tensor:
        """[V, H], in the form that the format's `apply` takes."""
        return self._loaded() if self.finished is None else self.finished

    def finish(self) -> None:
        """As `MergedLinear.finish`; a tied table stays for the embedding, the head is a copy."""
        loaded = self._loaded()
        finished = self.format.finish(loaded)
        if finished is not loaded:
            self.finished, self.weight = finished, None

    def slots(self, path: str) -> Iterator[WeightSlot]:
        if self._tied[0] is None:
            yield WeightSlot(name=f"{path}.weight", destination=self._loaded())

    def _loaded(self) -> Tensor:
        tied = self._tied[0]
        matrix = self.weight if tied is None else tied.weight
        assert matrix is not None, "the loaded form is gone once it is finished"
        return matrix
