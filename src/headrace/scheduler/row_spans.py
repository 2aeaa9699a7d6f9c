"""Rows that a step brings of its tokens: which, and to whom they go."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.scheduler.chooser import Share
from headrace.scheduler.sequence import Sequence, State
from headrace.scheduler.token_rows import RoutingRows, StateRows, TokenRows

Rows = TypeVar("Rows", bound=TokenRows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan(Generic[Rows]):
    """Those of positions [first, first + count) of a sequence, which `rows` take."""

    sequence: Sequence
    rows: Rows
    first: int
    count: int


def wanted_rows(
    shares: Seq[Share], kept: Callable[[Sequence], Rows | None]
) -> tuple[list[RowSpan[Rows]], list[int]]:
    """What the step of these shares brings, and the places of it among the step's tokens.

    Where only states of output tokens are asked, their rows begin at the last token of the prompt,
    and what comes before is not wanted.

    Args:
        kept: where a sequence keeps its rows; `None` for one that asks for none.
    """
    spans: list[RowSpan[Rows]] = []
    places: list[int] = []
    offset = 0
    for share in shares:
        sequence, rows = share.sequence, kept(share.sequence)
        if rows is not None:
            start, end = sequence.length_bound, sequence.length_bound + share.new_tokens
            first = max(start, rows.next_position)
            if first < end:
                spans.append(RowSpan(sequence=sequence, rows=rows, first=first, count=end - first))
                places += range(offset + first - start, offset + share.new_tokens)
        offset += share.new_tokens
    return spans, places


def inner_layers(spans: Seq[RowSpan[StateRows]]) -> tuple[int, ...]:
    """The inner layers that any of them asks for, ascending."""
    return tuple(sorted({layer for span in spans for layer in span.rows.inner}))


def take_states_of_rows(
    spans: Seq[RowSpan[StateRows]],
    states: Tensor,
    inner: tuple[int, ...],
    finite: Mapping[Sequence, bool],
) -> None:
    """Give the states of a step to its sequences.

    Args:
        states: [rows of all spans, L, H] on the host, the layers `inner` and the last norm's.
    """
    for span, own in _taking(spans, states.view(torch.uint8).numpy(), finite):
        span.rows.add(span.first, own, inner)


def take_routing(
    spans: Seq[RowSpan[RoutingRows]], ids: Tensor, finite: Mapping[Sequence, bool]
) -> None:
    """Give the experts of a step's tokens to its sequences.

    Args:
        ids: [rows of all spans, L, k] int32 on the host.
    """
    for span, own in _taking(spans, ids.numpy(), finite):
        span.rows.append(span.first, own)


def _taking(
    spans: Seq[RowSpan[Rows]], values: NDArray[Any], finite: Mapping[Sequence, bool]
) -> Iterator[tuple[RowSpan[Rows], NDArray[Any]]]:
    """Each span and its part of `values`; what has ended or failed takes none."""
    offset = 0
    for span in spans:
        end = offset + span.count
        if span.sequence.state is not State.FINISHED and finite[span.sequence]:
            yield span, values[offset:end]
        offset = end
