"""Which experts every token of a forward was given: filled on the device, layer by layer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.batch.rows import Allocate
from headrace.observers.step_observer import Evidence, ForwardRun

NAME = "routed_experts"


class RoutingBuffer:
    """Experts of the tokens of the last forward, [N, L, k] int32: of N tokens at most, in the L
    layers that have experts, k each, the one with the largest weight first.

    One place for all paths: graphs record the writes. Rows of padding hold something, too.
    """

    def __init__(self, tokens: int, layers: int, chosen: int, allocate: Allocate) -> None:
        """`allocate(tag, shape, dtype)` gives zeroed memory on the device."""
        self.ids = allocate("routing", (tokens, layers, chosen), torch.int32)

    def write(self, place: int, ids: Tensor) -> None:
        """The choice [T, k] of one layer; called by the layer."""
        self.ids[: ids.shape[0], place].copy_(ids)


class RoutedExperts:
    """Sends the experts of the tokens that a request asks for. A `StepObserver`."""

    name = NAME

    def __init__(self, buffer: RoutingBuffer) -> None:
        self._buffer = buffer

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        yield
        tokens = run.batch.side.routed_experts
        if tokens is not None:
            evidence.tensors[NAME] = self._buffer.ids.index_select(0, tokens)  # [M, L, k]

    def take(self, host: Mapping[str, Tensor]) -> None:
        """The scheduler takes them, who knows whose they are."""
