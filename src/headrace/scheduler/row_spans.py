"""Rows of hidden states that a step brings: which, and to whom they go."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from headrace.scheduler.chooser import Share
from headrace.scheduler.sequence import Sequence, State
from headrace.scheduler.state_rows import StateRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Those of positions [first, first + count) of a sequence."""

    sequence: Sequence
    first: int
    count: int

    @property
    def rows(self) -> StateRows:
        rows = self.sequence.state_rows
        assert rows is not None, "only sequences that keep rows have spans"
        return rows


def wanted_rows(shares: Seq[Share]) -> tuple[list[RowSpan], list[int]]:
    """What the step of these shares brings, and the places of it among the step's tokens.

    Where only states of output tokens are asked, their rows begin at the last token of the prompt,
    and what comes before is not wanted.
    """
    spans: list[RowSpan] = []
    places: list[int] = []
    offset = 0
    for share in shares:
        sequence = share.sequence
        if sequence.state_rows is not None:
            start, end = sequence.length_bound, sequence.length_bound + share.new_tokens
            first = max(start, sequence.state_rows.next_position)
            if first < end:
                spans.append(RowSpan(sequence=sequence, first=first, count=end - first))
                places += range(offset + first - start, offset + share.new_tokens)
        offset += share.new_tokens
    return spans, places


def inner_layers(spans: Seq[RowSpan]) -> tuple[int, ...]:
    """The inner layers that any of them asks for, ascending."""
    return tuple(sorted({layer for span in spans for layer in span.rows.inner}))


def take_rows(
    spans: Seq[RowSpan],
    states: Tensor,
    inner: tuple[int, ...],
    finite: Mapping[Sequence, bool],
) -> None:
    """Give the rows of a step to its sequences; what has ended or failed takes none.

    Args:
        states: [rows of all spans, L, H] on the host, the layers `inner` and the last norm's.
    """
    offset = 0
    for span in spans:
        sequence, end = span.sequence, offset + span.count
        if sequence.state is not State.FINISHED and finite[sequence]:
            span.rows.add(span.first, states[offset:end], inner)
        offset = end
