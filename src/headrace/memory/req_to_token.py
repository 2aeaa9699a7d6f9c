"""Rows to pages: one page table per KvGroup, on the device, changed from the host in batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.batch.transfer import to_device
from headrace.memory.arena import Arena


class ReqToTokenPool:
    """The rows of scheduled sequences and their page tables.

    Row 0 is the padding row: it is never handed out and its table says page 0 everywhere. A table
    is read up to the length of its row only, so freeing a row clears nothing.

    Args:
        arena: where the tables come from (tag "rows").
        num_rows: rows with the padding row. max_pages: pages of the longest possible sequence.
        groups: names of the KvGroups, each with a table.
    """

    def __init__(
        self, arena: Arena, *, num_rows: int, max_pages: int, groups: tuple[str, ...]
    ) -> None:
        self.num_rows, self.max_pages, self.groups = num_rows, max_pages, groups
        self._tables = {
            group: arena.allocate("rows", (num_rows, max_pages), torch.int32) for group in groups
        }
        self._free = list(range(num_rows - 1, 0, -1))  # a stack: its end is taken first
        self._live: set[int] = set()
        self._device = arena.device
        self._staged: dict[int, int] = {}  # place in a flat table -> the page to put there

    def table(self, group: str) -> Tensor:
        """The page table of a group, [num_rows, max_pages] int32. Its address never changes."""
        return self._tables[group]

    @property
    def available_rows(self) -> int:
        return len(self._free)

    @property
    def live_rows(self) -> frozenset[int]:
        return frozenset(self._live)

    def allocate_row(self) -> int | None:
        """A row of 1 .. num_rows-1, or `None` when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._live.add(row)
        return row

    def free_row(self, row: int) -> None:
        """Give a row back. The last step that names it must have been processed.

        Raises:
            AssertionError: the row is not taken; the message names it.
        """
        self._check_live(row)
        self._live.remove(row)
        self._free.append(row)

    def stage(self, row: int, column_start: int, pages: Sequence[int]) -> None:
        """Note that the row's pages from `column_start` on are `pages`; `flush` sends it.

        Args:
            row: a taken row.
            column_start: index, in pages, of the first one.
            pages: page numbers, of the one pool that all groups share.
        """
        self._check_live(row)
        if column_start < 0 or column_start + len(pages) > self.max_pages:
            raise AssertionError(
                f"row {row}: pages {column_start} to {column_start + len(pages)} do not fit into "
                f"a table of {self.max_pages} pages a row"
            )
        start = row * self.max_pages + column_start
        self._staged.update(enumerate(pages, start))

    def flush(self) -> int:
        """Send all staged changes: one copy, and one scatter into each table.

        Runs on the current stream, which must be the one that reads the tables; the host does not
        wait. Of two changes of one place the later holds, and the scatter never writes a place
        twice, whose outcome would be undefined on a GPU. Returns the number of places that change
        (0: nothing was launched).
        """
        staged, self._staged = self._staged, {}
        if staged:
            places, pages = self._send(staged)  # [N] int64, [N] int32
            for table in self._tables.values():
                table.view(-1).index_copy_(0, places, pages)
        return len(staged)

    def _send(self, staged: dict[int, int]) -> tuple[Tensor, Tensor]:
        # A fresh pinned block every time: torch's pinned allocator reuses a block only after the
        # copy that read it has passed, so a block in flight is never overwritten.
        count, is_cuda = len(staged), self._device.type == "cuda"
        staging = torch.empty((2, count), dtype=torch.int64, pin_memory=is_cuda)
        view = staging.numpy()
        view[0] = np.fromiter(staged.keys(), np.int64, count)
        view[1] = np.fromiter(staged.values(), np.int64, count)
        sent = to_device(staging, self._device)
        return sent[0], sent[1].to(torch.int32)

    def _check_live(self, row: int) -> None:
        if row not in self._live:
            raise AssertionError(f"row {row} is not taken")
