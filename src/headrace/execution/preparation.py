"""Fill a batch's tensors from the rows and page tables, on the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch, KvGroup
from headrace.batch.rows import Rows
from headrace.batch.transfer import to_device
from headrace.kernels.batch_preparation import gather_decode, gather_extend, write_slots


class BatchPreparation:
    """Gathers a step's inputs.

    Args:
        rows: the columns.
        tables: page table [R, max pages] int32 of each KV group.
        page_size: tokens per page.
    """

    def __init__(self, rows: Rows, tables: Mapping[str, Tensor], page_size: int) -> None:
        self._rows, self._tables, self._page_size = rows, dict(tables), page_size

    def fill(self, batch: ForwardBatch) -> None:
        """Set input_ids, positions, lengths and kv of `batch`; no wait for the device."""
        columns = self._rows
        if batch.prompt_tokens is None:
            batch.input_ids, batch.positions, batch.seq_lens = gather_decode(
                batch.rows, columns.last_token, columns.length, columns.active
            )
            token_rows = batch.rows
        else:
            new_tokens = to_device(
                torch.tensor(batch.bounds.extend_lens, dtype=torch.int32), columns.device
            )
            (
                batch.input_ids,
                batch.positions,
                owner,
                batch.seq_lens,
                batch.extend_lens,
                batch.prefix_lens,
            ) = gather_extend(
                batch.rows,
                new_tokens,
                batch.prompt_tokens,
                columns.last_token,
                columns.length,
                columns.active,
            )
            batch.extend_start = (torch.cumsum(new_tokens, 0) - new_tokens).to(torch.int32)
            token_rows = batch.rows[owner]
        batch.kv = self._groups(batch, token_rows)

    def _groups(self, batch: ForwardBatch, token_rows: Tensor) -> dict[str, KvGroup]:
        pages = -(-max(batch.bounds.seq_lens, default=0) // self._page_size)
        return {
            name: KvGroup(
                name=name,
                page_size=self._page_size,
                page_table=table[batch.rows, :pages],
                out_cache_loc=write_slots(
                    token_rows, batch.positions, self._rows.active, table, self._page_size
                ),
            )
            for name, table in self._tables.items()
        }
