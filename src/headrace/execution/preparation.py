"""Fill a batch's tensors from the rows and page tables, on the device."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import accumulate

import torch
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch, KvGroup
from headrace.batch.rows import Rows
from headrace.batch.transfer import to_device
from headrace.kernels.batch_preparation import gather_decode, gather_extend, write_slots
from headrace.kernels.support_triton import has_dependent_launch, triton_available


class BatchPreparation:
    """Gathers a step's inputs.

    Args:
        rows: the columns.
        tables: page table [R, max pages] int32 of each KV group.
        page_size: tokens per page.
        kernels: use Triton's where they run.
    """

    def __init__(
        self, rows: Rows, tables: Mapping[str, Tensor], page_size: int, *, kernels: bool = True
    ) -> None:
        self._rows, self._tables, self._page_size = rows, dict(tables), page_size
        self._prepare_extend: Callable[..., None] | None = None
        if kernels and rows.device.type == "cuda" and triton_available("cuda") is None:
            self.use_kernels(pdl=has_dependent_launch(rows.device))

    def use_kernels(self, *, pdl: bool) -> None:
        """Have prompt tokens prepared by Triton, in one launch and not in thirty."""
        kernels = import_module("headrace.kernels.batch_preparation_triton")
        self._prepare_extend = partial(kernels.prepare_extend, pdl=pdl)

    def fill(self, batch: ForwardBatch) -> None:
        """Set input_ids, positions, lengths and kv of `batch`; no wait for the device."""
        columns = self._rows
        if batch.prompt_tokens is not None:
            self._fill_extend(batch, batch.prompt_tokens)
            return
        batch.input_ids, batch.positions, batch.seq_lens = gather_decode(
            batch.rows, columns.last_token, columns.length, columns.active
        )
        batch.kv = self._groups(batch, self._slots(batch.rows, batch.positions))

    def _fill_extend(self, batch: ForwardBatch, prompt_tokens: Tensor) -> None:
        columns, new = self._rows, batch.bounds.extend_lens
        places = torch.tensor([new, [0, *accumulate(new)][: len(new)]], dtype=torch.int32)
        new_tokens, batch.extend_start = to_device(places, columns.device).unbind(0)
        state = {
            "last_token": columns.last_token,
            "length": columns.length,
            "active": columns.active,
        }
        if self._prepare_extend is None:
            (
                batch.input_ids,
                batch.positions,
                owner,
                batch.seq_lens,
                batch.extend_lens,
                batch.prefix_lens,
            ) = gather_extend(batch.rows, new_tokens, prompt_tokens, **state)
            slots = self._slots(batch.rows[owner], batch.positions)
        else:
            # Zeros, since dry steps leave the launch out and look up what lies there.
            tokens = prompt_tokens.new_zeros(2 + len(self._tables), len(prompt_tokens))
            batch.input_ids, batch.positions, *located = tokens.unbind(0)
            slots = dict(zip(self._tables, located, strict=True))
            lengths = new_tokens.new_zeros(3, len(new_tokens))
            batch.seq_lens, batch.extend_lens, batch.prefix_lens = lengths.unbind(0)
            self._prepare_extend(
                batch.rows,
                new_tokens,
                batch.extend_start,
                prompt_tokens,
                **state,
                tables=self._tables,
                page_size=self._page_size,
                max_new=max(new, default=0),
                input_ids=batch.input_ids,
                positions=batch.positions,
                seq_lens=batch.seq_lens,
                extend_lens=batch.extend_lens,
                prefix_lens=batch.prefix_lens,
                out_cache_locs=slots,
            )
        batch.kv = self._groups(batch, slots)

    def _slots(self, token_rows: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Of each group: where the tokens of these rows and positions are written, [T]."""
        active = self._rows.active
        return {
            name: write_slots(token_rows, positions, active, table, self._page_size)
            for name, table in self._tables.items()
        }

    def _groups(self, batch: ForwardBatch, slots: Mapping[str, Tensor]) -> dict[str, KvGroup]:
        pages = -(-max(batch.bounds.seq_lens, default=0) // self._page_size)
        return {
            name: KvGroup(
                name=name,
                page_size=self._page_size,
                page_table=table[batch.rows, :pages],
                out_cache_loc=slots[name],
            )
            for name, table in self._tables.items()
        }
