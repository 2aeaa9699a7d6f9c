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
        # group -> places in its flat table and the pages to put there, in the order of staging
        self._staged: dict[str, tuple[list[int], list[int]]] = {g: ([], []) for g in groups}

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

    def stage(
        self, row: int, column_start: int, pages: Sequence[int], *, group: str | None = None
    ) -> None:
        """Note that the row's pages from `column_start` on are `pages`; `flush` sends it.

        Args:
            row: a taken row.
            column_start: index, in pages, of the first one.
            pages: page numbers.
            group: one table only; by default all of them, for groups over one pool.
        """
        self._check_live(row)
        if column_start < 0 or column_start + len(pages) > self.max_pages:
            raise AssertionError(
                f"row {row}: pages {column_start} to {column_start + len(pages)} do not fit into "
                f"a table of {self.max_pages} pages a row"
            )
        start = row * self.max_pages + column_start
        for name in self.groups if group is None else (group,):
            staged_places, staged_pages = self._staged[name]
            staged_places.extend(range(start, start + len(pages)))
            staged_pages.extend(pages)

    def flush(self) -> int:
        """Send all staged changes: one copy, and one scatter for each table that changes.

        Runs on the current stream, which must be the one that reads the tables; the host does not
        wait. Returns the number of entries sent (0: nothing was launched).
        """
        changed = self._take_staged()
        total = sum(len(changes) for changes in changed.values())
        if not total:
            return 0
        places, pages = self._send(changed, total)  # [N] int64, [N] int32
        start = 0
        for group, changes in changed.items():
            part = slice(start, start + len(changes))
            self._tables[group].view(-1).index_copy_(0, places[part], pages[part])
            start = part.stop
        return total

    def _take_staged(self) -> dict[str, dict[int, int]]:
        """Group -> place -> page. Of two changes of one place the later holds, and the scatter
        never writes a place twice, whose outcome would be undefined on a GPU."""
        changed = {}
        for group, (places, pages) in self._staged.items():
            if places:
                changed[group] = dict(zip(places, pages, strict=True))
                places.clear()
                pages.clear()
        return changed

    def _send(self, changed: dict[str, dict[int, int]], total: int) -> tuple[Tensor, Tensor]:
        # A fresh pinned block every time: torch's pinned allocator reuses a block only after the
        # copy that read it has passed, so a block in flight is never overwritten.
        is_cuda = self._device.type == "cuda"
        staging = torch.empty((2, total), dtype=torch.int64, pin_memory=is_cuda)
        view = staging.numpy()
        start = 0
        for changes in changed.values():
            stop = start + len(changes)
            view[0, start:stop] = np.fromiter(changes.keys(), np.int64, len(changes))
            view[1, start:stop] = np.fromiter(changes.values(), np.int64, len(changes))
            start = stop
        sent = to_device(staging, self._device)
        return sent[0], sent[1].to(torch.int32)

    def _check_live(self, row: int) -> None:
        if row not in self._live:
            raise AssertionError(f"row {row} is not taken")
