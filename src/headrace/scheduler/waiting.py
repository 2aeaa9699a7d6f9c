"""The queue of sequences that have no row: by priority, then by arrival."""

import bisect
from collections.abc import Iterator

from headrace.scheduler.sequence import Sequence


class WaitingQueue:
    """Highest priority first, equal priorities in order of arrival.

    A retracted sequence comes back to its own place, before later arrivals of its priority.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)


def _order(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.request.priority, sequence.arrival)
