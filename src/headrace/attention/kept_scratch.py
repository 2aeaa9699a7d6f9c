"""Memory in which the splits of decode calls meet, kept from step to step."""

from typing import Generic, Protocol, Self, TypeVar

import torch


class Scratch(Protocol):
    """What one decode call needs; see `DecodeScratch` and `SplitScratch`."""

    @classmethod
    def allocate(
        cls, *, batch: int, heads: int, splits: int, value_dim: int, device: torch.device
    ) -> Self:
        """Memory for so many rows, query heads, splits of a row, and numbers of a value."""
        ...

    def holds(self, *, batch: int, heads: int, splits: int, value_dim: int) -> bool:
        """Whether it is large enough."""
        ...


Kind = TypeVar("Kind", bound=Scratch)


class KeptScratch(Generic[Kind]):
    """Scratch of eager steps, and of graphs.

    Layers, steps and graphs follow each other, so that they share it; it grows with what is asked.
    What an earlier graph was captured with is kept as long as this is.
    """

    def __init__(self, kind: type[Kind], device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._step: Kind | None = None
        self.captured: list[Kind] = []

    def of_step(self, **sizes: int) -> Kind:
        """For an eager step."""
        if self._step is None or not self._step.holds(**sizes):
            self._step = self._kind.allocate(**sizes, device=self._device)
        return self._step

    def capture(self, **sizes: int) -> None:
        """Make ready what the next graph needs."""
        if not (self.captured and self.captured[-1].holds(**sizes)):
            self.captured.append(self._kind.allocate(**sizes, device=self._device))

    def of_graph(self) -> Kind:
        """For the graph that `capture` was called for."""
        return self.captured[-1]
