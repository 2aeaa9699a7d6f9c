"""What a sequence keeps for its request of every token: one row for each position.

From the first position that is asked on, without a gap and none twice: a step brings the rows that
come next, whatever it computes besides. So a retracted sequence, which computes positions once
more, asks for the missing ones only, and may take all others from the prefix cache.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


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
